package tools

import "testing"

func TestStagedModulesAreTakenFromTheProxy(t *testing.T) {
	const mod = "module k8s.io/kubernetes\n\nrequire k8s.io/api v0.0.0\n\nreplace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n\texample.org/a => example.org/b v1.2.3\n)\n"
	const want = "module k8s.io/kubernetes\n\nrequire k8s.io/api v0.0.0\n\nreplace (\n\tk8s.io/api => k8s.io/api v0.36.3\n\texample.org/a => example.org/b v1.2.3\n)\n"
	if got := unstaged(mod, "v1.36.3"); got != want {
		t.Errorf("go.mod is\n%s\nwant\n%s", got, want)
	}
}
