package storage

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// Damage as a power cut leaves it: the store is refused with the file's name,
// and everything in it stays as it was.
func TestDamagedRecordsAreRefused(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "precious"))
	c := n.rootfs("c", img.ID)
	n.mount(c) // makes a container record
	n.removeRootfs(c)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{
		"overlay-layers/layers.json", "overlay-images/images.json", "overlay-containers/containers.json",
	} {
		path := filepath.Join(n.cfg.Root, file)
		good, err := os.ReadFile(path)
		missing := errors.Is(err, os.ErrNotExist)
		if err != nil && !missing {
			t.Fatal(err)
		}
		for what, bad := range map[string]string{"empty": "", "cut": `[{"id":"abc`, "zeros": strings.Repeat("\x00", 100), "other": `{"a":1}`} {
			if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
				t.Fatal(err)
			}
			before := snapshot(t, n.cfg.Root)
			s, err := Open(t.Context(), n.cfg)
			if err == nil {
				s.Close()
			}
			if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), path) {
				t.Errorf("%s, %s: %v", file, what, err)
			}
			if after := snapshot(t, n.cfg.Root); before != after {
				t.Errorf("%s, %s: the store was changed:\n%s\n%s", file, what, before, after)
			}
		}
		if missing {
			err = os.Remove(path)
		} else {
			err = os.WriteFile(path, good, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	n.open()
	if images := n.list(); len(images) != 1 || images[0].ID != img.ID {
		t.Errorf("after the repair: %+v", images)
	}
}

// snapshot is every file of a tree with its size and time.
func snapshot(t *testing.T, root string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && !d.IsDir() {
			all.WriteString(path + " " + info.ModTime().String() + "\n")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

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
	if err := n.Adopt(t.Context(), []Rootfs{c}); err != nil { // makes the hold anew
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
