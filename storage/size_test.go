package storage

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDeviceOf(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := unix.Mount("some-device", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	link := filepath.Join(t.TempDir(), "link")
	if err := unix.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{dir: "some-device", link: "some-device", filepath.Join(dir, "none"): ""} {
		if got := deviceOf(path); got != want {
			t.Errorf("device of %s is %q, want %q", path, got, want)
		}
	}
}

func TestWritableSize(t *testing.T) {
	t.Parallel()
	s := newNode(t)
	if err := os.MkdirAll(s.containersDir, 0o700); err != nil {
		t.Fatal(err)
	}
	size, err := s.WritableSize()
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(s.containersDir, &st); err != nil {
		t.Fatal(err)
	}
	if size.Bytes != st.Blocks*uint64(st.Bsize) || size.Inodes != st.Files || size.FreeInodes > size.Inodes || size.Device == "" {
		t.Errorf("size is %+v, the kernel says %+v", size, st)
	}
	s.containersDir = "/nowhere"
	if _, err := s.WritableSize(); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("of a directory that is not there: %v", err)
	}
}
