package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// What does not fit is refused with both numbers. Directories on one file system share its space.
func TestCheckRoom(t *testing.T) {
	t.Parallel()
	root, out := Room{"/root", 100 << 20, 1}, Room{"/out", 30 << 20, 2}
	for _, c := range []struct {
		bytes uint64
		rooms []Room
		words string // empty: it fits
	}{
		{30 << 20, []Room{root, out}, ""},
		{31 << 20, []Room{root, out}, "needs at least 31.0 MiB on the file system of /out, which has 30.0 MiB"},
		{50 << 20, []Room{root, {"/root/out", 100 << 20, 1}}, ""},
		{51 << 20, []Room{root, {"/root/out", 100 << 20, 1}}, "needs at least 102.0 MiB on the file system of /root"},
		{0, []Room{{"/full", 0, 3}}, ""},
	} {
		err := CheckRoom(c.bytes, c.rooms...)
		if c.words == "" && err != nil || c.words != "" && (!errors.Is(err, fault.Exhausted) || !strings.Contains(err.Error(), c.words)) {
			t.Errorf("%d bytes in %v: %v, want %q", c.bytes, c.rooms, err, c.words)
		}
	}
	if r, err := RoomIn(t.TempDir()); err != nil || r.Device == 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := RoomIn(filepath.Join(t.TempDir(), "missing")); err == nil {
		t.Error("a missing directory has room")
	}
}

// The size of a layer is that of its files, each once, without what mounts hide.
func TestLayerSize(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, size := range map[string]int{"a": 1000, "sub/b": 200, "hidden/c": 50, "file": 7} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, make([]byte, size), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "sub", "again")), os.Symlink("a", filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	if size, err := LayerSize(dir, []string{"/hidden/", "/file"}); size != 1200 || err != nil {
		t.Errorf("%d bytes, %v, want 1200", size, err)
	}
	if _, err := LayerSize(filepath.Join(dir, "missing"), nil); err == nil {
		t.Error("a missing layer has a size")
	}
}
