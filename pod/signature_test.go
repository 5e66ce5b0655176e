package pod

import (
	"errors"
	"fmt"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage"
)

// The policy of the pod's namespace is asked about every image by the name that the
// pod's author gave, before anything is made of it.
func TestCreateAsksSignaturePolicy(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	cfg := containerConfig("c")
	cfg.Image.UserSpecifiedImage = "example.org/app:1"
	cfg.Mounts = []*cri.Mount{{ContainerPath: "/v", Readonly: true, Image: &cri.ImageSpec{Image: "image"}}}
	refusal := fmt.Errorf("%w: %w", storage.ErrSignature, fault.Denied)
	for step, volume := range map[string]bool{"admit default example.org/app:1": false, "admit default image": true} {
		b.node.fail[step] = refusal
		_, err := e.CreateContainer(t.Context(), pod, cfg, nil)
		if !errors.Is(err, storage.ErrSignature) || errors.Is(err, ErrImageVolume) != volume {
			t.Errorf("%s: %v", step, err)
		}
		if n := b.node.count("mount"); n > 0 {
			t.Errorf("%s: %d root file systems", step, n)
		}
		delete(b.node.fail, step)
	}
	b.remove(e, pod)
	b.nothingLeft()
}
