package pod

import (
	"errors"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// An OCI artifact has no program, and is refused before anything is made.
func TestArtifactsAreNotRun(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	cfg := containerConfig("c")
	cfg.Image = &cri.ImageSpec{Image: "artifact"}
	if _, err := e.CreateContainer(t.Context(), pod, cfg, nil); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "OCI artifact") {
		t.Errorf("run: %v", err)
	}
	if n := b.node.count("mount"); n > 0 {
		t.Errorf("%d root file systems", n)
	}
	b.remove(e, pod)
	b.nothingLeft()
}
