package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// deepen makes a chain of directories, deeper than a path can be long, with a
// file at each level.
func deepen(t *testing.T, dir string, levels int) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range levels {
		down := -1
		err := errors.Join(unix.Mkdirat(at, "d", 0o755), unix.Mknodat(at, "f", unix.S_IFREG|0o644, 0))
		if err == nil {
			down, err = unix.Openat(at, "d", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(at)
		at = down
	}
	unix.Close(at)
}

// A container that nests directories does not use up the server's descriptors,
// nor hide what is in them.
func TestTreeIsDeep(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const levels = 3000
	deepen(t, dir, levels)
	for i := range 5 { // and wide
		if err := os.MkdirAll(filepath.Join(dir, "d", fmt.Sprint(i), "x"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	tree := tree{linked: map[inode]bool{}}
	most := 0
	tree.stop = func() bool {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Error(err)
		}
		most = max(most, len(fds))
		return false
	}
	if err := tree.add(dir); err != nil {
		t.Fatal(err)
	}
	if want := uint64(1 + 2*levels + 10); tree.inodes != want {
		t.Errorf("counted %d, want %d", tree.inodes, want)
	}
	if most > levels/2 { // other tests have theirs
		t.Errorf("%d descriptors", most)
	}
}

func TestRemoveTree(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "upper")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	deepen(t, dir, 3000)
	outside := t.TempDir()
	for i := range 3000 {
		path := filepath.Join(dir, "d", fmt.Sprint(i%40), fmt.Sprint(i))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	kept := filepath.Join(outside, "kept")
	if err := errors.Join(os.WriteFile(kept, nil, 0o600), os.Symlink(outside, filepath.Join(dir, "d", "link")), os.MkdirAll(filepath.Join(dir, "empty"), 0o755)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing
		if err := removeTree(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("a link was followed: %v", err)
	}
	file := filepath.Join(outside, "file")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), removeTree(file)); err != nil {
		t.Error(err)
	}
	// A directory that cannot be removed says so.
	busy := filepath.Join(outside, "busy")
	if err := errors.Join(os.MkdirAll(filepath.Join(busy, "a", "b"), 0o755), unix.Mount("test", filepath.Join(busy, "a", "b"), "tmpfs", 0, "size=64k")); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(filepath.Join(busy, "a", "b"), 0)
	if err := removeTree(busy); !errors.Is(err, unix.EBUSY) {
		t.Errorf("with a mount in it: %v", err)
	}
}

func TestTreeStops(t *testing.T) {
	t.Parallel()
	tree := tree{linked: map[inode]bool{}, stop: func() bool { return true }}
	if err := tree.add(t.TempDir()); !errors.Is(err, errStopped) {
		t.Errorf("got %v", err)
	}
}

func TestTreeGone(t *testing.T) {
	t.Parallel()
	tree := tree{linked: map[inode]bool{}}
	if err := tree.add(filepath.Join(t.TempDir(), "none")); err != nil || tree.inodes != 0 {
		t.Errorf("%v, %d", err, tree.inodes)
	}
}
