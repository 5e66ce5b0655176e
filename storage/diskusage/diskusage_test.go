package diskusage

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// newLayer makes a layer as the library does, with a file of 40 KiB and a hard link to it.
func newLayer(t *testing.T) Layer {
	t.Helper()
	driver := t.TempDir()
	l := Layer{Dir: filepath.Join(driver, "id"), Split: filepath.Join(driver, "split")}
	files := filepath.Join(l.Dir, FilesName)
	err := errors.Join(
		os.MkdirAll(files, 0o755), os.Mkdir(filepath.Join(driver, LinksName), 0o755),
		os.WriteFile(filepath.Join(files, "one"), make([]byte, 40<<10), 0o600), os.Link(filepath.Join(files, "one"), filepath.Join(files, "two")),
		os.WriteFile(l.Split, make([]byte, 8<<10), 0o600), os.WriteFile(filepath.Join(l.Dir, linkName), []byte("SHORT"), 0o600),
		os.Symlink("../id/diff", filepath.Join(driver, LinksName, "SHORT")), os.Mkdir(filepath.Join(l.Dir, "merged"), 0o700))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// A layer is its directory, with a hard link counted once, its tar-split data and the link to it; what is mounted in it is
// not.
func TestMeasure(t *testing.T) {
	t.Parallel()
	l := newLayer(t)
	before, err := l.Measure(nil)
	if err != nil || before.Inodes != 7 || before.Bytes < 48<<10 || before.Bytes > 128<<10 {
		t.Errorf("%+v, %v", before, err)
	}
	merged := filepath.Join(l.Dir, "merged")
	if err := unix.Mount("tmpfs", merged, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(merged, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(merged, "f"), make([]byte, 512<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	if with, err := l.Measure(nil); err != nil || with.Inodes != before.Inodes-1 || with.Bytes > before.Bytes {
		t.Errorf("with a mount: %+v, %v, before %+v", with, err, before)
	}
}

// A note is what was measured. It is not valid for a copy of the layer, nor before it is complete.
func TestNote(t *testing.T) {
	t.Parallel()
	l := newLayer(t)
	if found, ok := Noted(l.Dir); ok {
		t.Errorf("before there is a note: %+v", found)
	}
	usage, err := l.Note(nil)
	if err != nil {
		t.Fatal(err)
	}
	if found, ok := Noted(l.Dir); !ok || found != usage || usage.Inodes != 7 {
		t.Errorf("noted is %+v, %t, measured %+v", found, ok, usage)
	}
	elsewhere := filepath.Join(t.TempDir(), "copy")
	if out, err := exec.Command("cp", "-a", l.Dir, elsewhere).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := unix.Lgetxattr(elsewhere, noted, nil); err != nil {
		t.Fatalf("the copy has no attribute: %v", err)
	}
	if found, ok := Noted(elsewhere); ok {
		t.Errorf("the copy has the note %+v", found)
	}
	if err := unix.Lsetxattr(l.Dir, noted, make([]byte, notedSize), 0); err != nil { // as by who dies in NoteWith
		t.Fatal(err)
	}
	if found, ok := Noted(l.Dir); ok {
		t.Errorf("an unfinished note: %+v", found)
	}
}
