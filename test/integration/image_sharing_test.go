package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/node"
)

// skopeo copies an image between the registry and the node's own storage.
func (w *world) skopeo(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	args = append([]string{"--policy", w.Path("policy.json")}, args...)
	out, err := w.Run(ctx, "skopeo", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// stored is an image of the node's storage as the containers/ tools name it.
func (w *world) stored(name string) string {
	return fmt.Sprintf("containers-storage:[overlay@%s+%s]%s", w.Path("img"), w.Path("imgrun"), name)
}

// Podman, skopeo and buildah use the same storage: what one brings in, the
// others see and can use.
func TestStorageIsSharedWithSkopeo(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	theirs, ours := unusual(t, "theirs"), unusual(t, "ours")
	w.Registry.Push("theirs", "v1", theirs)
	w.Registry.Push("ours", "v1", ours)

	const name = node.RegistryHost + "/theirs:v1"
	w.skopeo(t, "copy", "--src-tls-verify=false", "docker://"+node.RegistryAddress+"/theirs:v1", w.stored(name))
	if img := w.imageStatus(t, name); img == nil || img.Id != theirs.ID() {
		t.Fatalf("the image that skopeo brought in is %v", img)
	}
	p := w.run(t, "runc")
	equal(t, "file of skopeo's image", p.finish(t, "cat /note ; echo", func(c *cri.ContainerConfig) { c.Image.Image = name }),
		t.Name()+"theirs\n")

	w.pull(t, node.RegistryHost+"/ours:v1")
	config := w.skopeo(t, "inspect", "--config", w.stored(node.RegistryHost+"/ours:v1"))
	if !strings.Contains(config, t.Name()+"ours") {
		t.Errorf("skopeo finds another image than crius has pulled: %s", config)
	}
	w.skopeo(t, "delete", w.stored(node.RegistryHost+"/ours:v1"))
	if img := w.imageStatus(t, node.RegistryHost+"/ours:v1"); img != nil {
		t.Errorf("an image that skopeo has deleted is still there: %v", img)
	}
}
