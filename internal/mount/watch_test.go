package mount

import (
	"testing"

	"golang.org/x/sys/unix"
)

// Each change of the mount table is reported once; the first call always reports one. The test
// makes mounts of its own, and others may make theirs at the same time.
func TestWatch(t *testing.T) {
	var w Watch
	defer w.Close()
	settle := func() {
		for w.Changed() {
		}
	}
	if !w.Changed() {
		t.Error("no change at the first look")
	}
	dir := t.TempDir()
	settle()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	if !w.Changed() {
		t.Error("no change after a mount")
	}
	settle()
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if !w.Changed() {
		t.Error("no change after an unmount")
	}
	w.Close()
	w.Close()
	if !w.Changed() {
		t.Error("no change at the first look after Close")
	}
}
