package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cstorage "go.podman.io/storage"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// neighbours makes a container of CRI-O and one of podman in the node's image
// store.
func (w *world) neighbours(t *testing.T) (crio, podman string, layers func() int) {
	t.Helper()
	images, err := w.Images().ListImages(t.Context(), &cri.ListImagesRequest{})
	must(t, err)
	image := images.Images[0].Id
	t.Setenv("_CONTAINERS_OVERLAY_DISABLE_IDMAP", "yes")
	store, err := cstorage.GetStore(cstorage.StoreOptions{GraphRoot: w.Path("img"), RunRoot: w.Path("imgrun"), GraphDriverName: "overlay"})
	must(t, err)
	t.Cleanup(func() {
		if _, err := store.Shutdown(false); err != nil {
			t.Error(err)
		}
	})
	crio, podman = randomID(), randomID()
	for id, metadata := range map[string]string{
		crio:   fmt.Sprintf(`{"pod-name":"k8s_web_shop_5e0c_0","pod-id":%q,"name":"k8s_POD_web_shop_5e0c_0","metadata-name":"web","pod":true,"created-at":1700000000}`, crio),
		podman: `{"image-name":"x","name":"toolbox","created-at":1700000000}`,
	} {
		_, err := store.CreateContainer(id, []string{id[:8]}, image, "", metadata, &cstorage.ContainerOptions{LabelOpts: []string{"disable"}, Volatile: true})
		must(t, err)
	}
	layers = func() int {
		entries, err := os.ReadDir(filepath.Join(w.Path("img"), "overlay"))
		must(t, err)
		// Others are the library's own, such as tempdirs, which the first deletion makes.
		return len(slices.DeleteFunc(entries, func(e os.DirEntry) bool { return len(e.Name()) != len(crio) }))
	}
	return crio, podman, layers
}

// check lists, and wipe foreign removes, what CRI-O has left in the image
// store, with and without a server; the pods of crius run on, and podman's
// containers stay unless they are named.
func TestContainersThatCrioHasLeft(t *testing.T) {
	for name, served := range map[string]bool{"server": true, "no server": false} {
		t.Run(name, func(t *testing.T) {
			w := private(t, node.Options{})
			c := w.run(t, "crun").start(t, "sleep")
			crio, podman, layers := w.neighbours(t)
			if !served {
				must(t, w.Stop())
			}
			before := layers()
			out, _ := w.crius(t, "check")
			for _, line := range []string{"warn  other runtimes CRI-O has 1 container of 1 pod in the image store", "pod shop/web (" + crio[:13] + "), created ", " ago: POD\n"} {
				if !strings.Contains(out, line) {
					t.Errorf("check says nothing about %q in\n%s", line, out)
				}
			}
			if out, code := w.wipe(t, "", "foreign", "--list"); code != 0 || !strings.Contains(out, podman[:13]) || !strings.Contains(out, crio[:13]) {
				t.Errorf("code %d: %s", code, out)
			}
			if out, code := w.wipe(t, "no", "foreign"); code != 1 || !strings.Contains(out, "shop/web POD") || !strings.Contains(out, "nothing was removed") {
				t.Errorf("code %d: %s", code, out)
			}
			equal(t, "layers", layers(), before)
			if out, code := w.wipe(t, "yes", "foreign"); code != 0 || !strings.Contains(out, "removed: containers 1\n") {
				t.Errorf("code %d: %s", code, out)
			}
			equal(t, "layers", layers(), before-1)
			if out, code := w.wipe(t, "", "foreign", "--yes"); code != 0 || !strings.Contains(out, "there are no containers of CRI-O") {
				t.Errorf("code %d: %s", code, out)
			}
			if out, code := w.wipe(t, "", "foreign", "--yes", podman); code != 0 || !strings.Contains(out, "removed: containers 1\n") {
				t.Errorf("code %d: %s", code, out)
			}
			equal(t, "layers", layers(), before-2)
			if !served {
				must(t, w.Start(t.Context()))
			}
			equal(t, "container of crius", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		})
	}
}
