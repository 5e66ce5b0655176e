package main_test

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// hostPath volumes of type "" rely on it, and both peers do so, though
// api.proto requires an error.
func TestMissingHostPathIsMade(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	missing := filepath.Join(w.Dir(t), "a", "b", "c")
	c := w.Pod(t, "crun").Start(t, "write /v/f x ; sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: missing}))
	st, err := os.Stat(missing)
	if err != nil || !st.IsDir() || st.Mode().Perm() != 0o755 {
		t.Errorf("the host path is %v, %v, want a directory with mode 0755", st, err)
	}
	wait.For(t, "what the container writes", func() bool { data, _ := os.ReadFile(filepath.Join(missing, "f")); return string(data) == "x" })
	c.Remove(t)
	if _, err := os.Stat(filepath.Join(missing, "f")); err != nil {
		t.Error("the volume went away with its container")
	}
}

// The source of a mount is the target of a link.
func TestHostPathThatIsALink(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	dir := w.Dir(t)
	for _, err := range []error{
		os.Mkdir(filepath.Join(dir, "real"), 0o755),
		os.WriteFile(filepath.Join(dir, "real", "f"), []byte("x"), 0o644),
		os.Symlink("real", filepath.Join(dir, "link")),
		os.Symlink("nowhere", filepath.Join(dir, "dangling")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	p := w.Pod(t, "crun")
	scene.Equal(t, "content", p.Finish(t, "cat /v/f", mounted(&cri.Mount{ContainerPath: "/v", HostPath: filepath.Join(dir, "link")})), "x")
	_, err := p.Try(t.Context(), "sleep", mounted(&cri.Mount{ContainerPath: "/v", HostPath: filepath.Join(dir, "dangling")}))
	if _, statErr := os.Stat(filepath.Join(dir, "nowhere")); err == nil && statErr != nil {
		t.Error("a link that leads nowhere was accepted, and nothing was made")
	}
}

func TestHostPathsThatAreNeverMade(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{Config: "[pod]\nreject_missing_mounts = [\"{{.Path \"precious\"}}\", \"/etc/hostname-of-crius\"]\n"})
	p := w.Pod(t, "crun")
	p.Untouched(t, func() {
		_, err := p.Try(t.Context(), "sleep", mounted(
			&cri.Mount{ContainerPath: "/first", HostPath: filepath.Join(w.Dir(t), "made")},
			&cri.Mount{ContainerPath: "/v", HostPath: w.Path("precious")}))
		scene.WantOneOf(t, err, []codes.Code{codes.NotFound, codes.FailedPrecondition, codes.InvalidArgument}, w.Path("precious"))
	})
	if _, err := os.Lstat(w.Path("precious")); err == nil {
		t.Error("it was made all the same")
	}
	p.Finish(t, "ls /v", mounted(&cri.Mount{ContainerPath: "/v", HostPath: filepath.Join(w.Dir(t), "other")}))
	if err := os.Mkdir(w.Path("precious"), 0o755); err != nil {
		t.Fatal(err)
	}
	p.Finish(t, "ls /v", mounted(&cri.Mount{ContainerPath: "/v", HostPath: w.Path("precious")}))
}
