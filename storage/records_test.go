package storage

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// The files that nobody syncs may be anything after a power cut. They are put
// aside, and the images are still there.
func TestDamagedVolatileRecordsAreMovedAside(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	c := n.rootfs("c", img.ID)
	n.mount(c)
	if err := n.UnmountRootfs(c); err != nil { // a power cut unmounts, too
		t.Fatal(err)
	}
	garbage := []byte("\x00\x00[{")
	for _, file := range []string{"overlay-layers/volatile-layers.json", "overlay-containers/volatile-containers.json"} {
		if err := os.WriteFile(filepath.Join(n.cfg.Root, file), garbage, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n.open()
	if images := n.list(); len(images) != 1 || images[0].ID != img.ID {
		t.Errorf("%+v", images)
	}
	if err := n.Adopt(t.Context(), []Rootfs{c}); err != nil { // makes a new hold
		t.Error(err)
	}
	n.mount(c)
	n.removeRootfs(c)
	n.remove(img.ID)
	n.empty()
	kept, err := os.ReadFile(filepath.Join(n.cfg.Root, "overlay-layers/volatile-layers.json.damaged"))
	if err != nil || !bytes.Equal(kept, garbage) {
		t.Errorf("%q, %v", kept, err)
	}
}
