package integration

import (
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// An image that was pulled by a namespace with a lax policy is neither run nor
// mounted in a strict one, even by its id, by the name of an accepted image, or
// by a server that has not seen the pull.
func TestSignaturePolicyOfNamespaceHoldsForImagesThatAreHere(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{Config: "[image]\nsignature_policy_dir = \"{{.Path \"policies\"}}\"\n"})
	if err := os.MkdirAll(w.Path("policies"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := w.Write("policies/strict.json", `{"default": [{"type": "reject"}], "transports": {"docker": {"`+probe+`": [{"type": "insecureAcceptAnything"}]}}}`); err != nil {
		t.Fatal(err)
	}
	ref := w.unusual(t, "lax")
	id := w.pull(t, ref)
	strict := func(c *cri.PodSandboxConfig) { c.Metadata.Namespace = "strict" }
	asVolume := func(c *cri.ContainerConfig) {
		c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: "/v", Readonly: true, Image: &cri.ImageSpec{Image: id, UserSpecifiedImage: ref}})
	}
	changes := map[string]struct {
		change containerChange
		want   string
	}{
		"by name":            {ofImage(ref), "SignatureValidationFailed: "},
		"by id":              {ofImage(id), "SignatureValidationFailed: "},
		"as the kubelet has": {func(c *cri.ContainerConfig) { c.Image = &cri.ImageSpec{Image: id, UserSpecifiedImage: ref} }, "SignatureValidationFailed: "},
		"by another's name":  {func(c *cri.ContainerConfig) { c.Image = &cri.ImageSpec{Image: id, UserSpecifiedImage: probe} }, "SignatureValidationFailed: "},
		"as a volume":        {asVolume, "ImageVolumeMountFailed: SignatureValidationFailed: "},
	}
	for _, restarted := range []bool{false, true} {
		if restarted {
			must(t, w.Restart(t.Context()))
		}
		p := w.run(t, "runc", strict)
		for name, test := range changes {
			_, err := p.try(t.Context(), steps("sleep"), test.change)
			if status.Code(err) != codes.Unknown || !strings.HasPrefix(status.Convert(err).Message(), test.want) || !strings.Contains(err.Error(), "signature policy") {
				t.Errorf("%s (restarted: %t): %v", name, restarted, err)
			}
		}
		p.start(t, "sleep")
		w.run(t, "runc").start(t, "sleep", ofImage(ref), asVolume)
	}
}
