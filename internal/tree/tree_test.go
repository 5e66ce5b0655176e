package tree

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Several may remove one tree at once, as a sweep does beside the one who has made it.
func TestRemoveTogether(t *testing.T) {
	t.Parallel()
	for range 3 {
		dir := filepath.Join(t.TempDir(), "upper")
		for i := range 100 {
			if err := os.MkdirAll(filepath.Join(dir, fmt.Sprint(i%10), fmt.Sprint(i), "a/b"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		var removing sync.WaitGroup
		for range 3 {
			removing.Go(func() {
				if err := Remove(dir); err != nil {
					t.Error(err)
				}
			})
		}
		removing.Wait()
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
}

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

// A container that nests directories neither uses up the server's descriptors
// nor hides their contents.
func TestIsDeep(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const levels = 3000
	deepen(t, dir, levels)
	for i := range 5 { // and wide
		if err := os.MkdirAll(filepath.Join(dir, "d", fmt.Sprint(i), "x"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var u Usage
	most := 0
	u.Stop = func() bool {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Error(err)
		}
		most = max(most, len(fds))
		return false
	}
	if err := u.Add(dir); err != nil {
		t.Fatal(err)
	}
	if want := uint64(1 + 2*levels + 10); u.Inodes != want {
		t.Errorf("counted %d, want %d", u.Inodes, want)
	}
	if most > levels/2 { // other tests have theirs
		t.Errorf("%d descriptors", most)
	}
}

// For directories nested beyond all measure the server keeps a bounded number,
// reports that, and removes all of them.
func TestIsTooDeep(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "upper")
	if err := os.MkdirAll(filepath.Join(dir, "beside", "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	const levels = 2*maxDepth + 100
	deepen(t, dir, levels)
	var u Usage
	if err := u.Add(dir); !errors.Is(err, errDeep) {
		t.Errorf("measured with the error %v", err)
	}
	if want := uint64(2*maxDepth + 2); u.Inodes != want {
		t.Errorf("counted %d, want %d", u.Inodes, want)
	}
	if err := Remove(dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after its removal: %v", err)
	}
}

func TestRemove(t *testing.T) {
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
		if err := Remove(dir); err != nil {
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
	if err := errors.Join(os.WriteFile(file, nil, 0o600), Remove(file)); err != nil {
		t.Error(err)
	}
	// A directory that cannot be removed is reported.
	busy := filepath.Join(outside, "busy")
	if err := errors.Join(os.MkdirAll(filepath.Join(busy, "a", "b"), 0o755), unix.Mount("test", filepath.Join(busy, "a", "b"), "tmpfs", 0, "size=64k")); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(filepath.Join(busy, "a", "b"), unix.MNT_DETACH)
	if err := Remove(busy); !errors.Is(err, unix.EBUSY) {
		t.Errorf("with a mount in it: %v", err)
	}
}

func TestMeasuringStopsOnRequest(t *testing.T) {
	t.Parallel()
	u := Usage{Stop: func() bool { return true }}
	if err := u.Add(t.TempDir()); !errors.Is(err, ErrStopped) {
		t.Errorf("got %v", err)
	}
}

// isOpen reports whether this process has a directory open.
func isOpen(t *testing.T, dir string) bool {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Error(err)
	}
	return slices.ContainsFunc(fds, func(fd string) bool {
		name, _ := os.Readlink(fd) // it may be closed meanwhile
		return name == dir
	})
}

// A container that moves a directory while it is measured hides nothing.
func TestMovedDirectoriesAreCounted(t *testing.T) {
	t.Parallel()
	for what, at := range map[string][2]string{
		"the parent":             {"a/b/c", "moved"},
		"one further up":         {"a/b", "moved"},
		"the first":              {"a", "z/moved"},
		"and nothing comes back": {"a", "../outside"},
	} {
		dir := filepath.Join(t.TempDir(), "upper")
		want := uint64(1)
		for _, name := range []string{"a", "a/b", "a/b/c", "a/b/c/d", "a/b/c/x", "a/b/x", "a/b/y", "a/x", "a/y", "z"} {
			if err := errors.Join(os.MkdirAll(filepath.Join(dir, name), 0o755), os.WriteFile(filepath.Join(dir, name, "f"), nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			want += 2
		}
		var u Usage
		u.Stop = func() bool {
			if at[0] == "" || !isOpen(t, filepath.Join(dir, "a/b/c/d")) {
				return false
			}
			if err := os.Rename(filepath.Join(dir, at[0]), filepath.Join(dir, at[1])); err != nil {
				t.Error(err)
			}
			at[0] = ""
			return false
		}
		if err := u.Add(dir); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if at[0] != "" || u.Inodes < want {
			t.Errorf("%s: counted %d, want %d", what, u.Inodes, want)
		}
	}
}

func TestGone(t *testing.T) {
	t.Parallel()
	var u Usage
	if err := u.Add(filepath.Join(t.TempDir(), "none")); err != nil || u.Inodes != 0 {
		t.Errorf("%v, %d", err, u.Inodes)
	}
}

// widen makes directories in dir, whose names have 250 bytes.
func widen(t *testing.T, dir string, count int) {
	t.Helper()
	for i := range count {
		if err := os.Mkdir(filepath.Join(dir, fmt.Sprintf("%0250d", i)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// The memory of a walk does not grow with the number of directories.
func TestKeepsLittle(t *testing.T) { // alone in the process: it measures the heap
	dir := t.TempDir()
	const width, files = 20_000, 3
	widen(t, dir, width)
	for i := range files {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	before, most, looks := heap(), uint64(0), 0
	u := Usage{Stop: func() bool {
		if looks++; looks%200 == 199 {
			most = max(most, heap())
		}
		return false
	}}
	if err := u.Add(dir); err != nil {
		t.Fatal(err)
	}
	if want := uint64(1 + width + files); u.Inodes != want {
		t.Errorf("counted %d, want %d", u.Inodes, want)
	}
	if grown := int64(most) - int64(before); looks < 200 || grown > 2<<20 {
		t.Errorf("%d bytes in %d looks", grown, looks)
	}
}

// However few names may be kept, everything is counted once, and removed.
func TestInBatches(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "upper")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	const levels, width = 6, 1100
	at, want := dir, uint64(1)
	for range levels { // more names than may be kept
		widen(t, at, width)
		for i := range 40 {
			if err := os.WriteFile(filepath.Join(at, fmt.Sprint(i)), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want += width + 40
		at = filepath.Join(at, fmt.Sprintf("%0250d", 0))
	}
	for _, width := range []int{1, 2, 3} { // and narrow ones
		widen(t, at, width)
		want += uint64(width)
		at = filepath.Join(at, fmt.Sprintf("%0250d", 0))
	}
	var u Usage
	if err := u.Add(dir); err != nil || u.Inodes != want {
		t.Errorf("counted %d, want %d, %v", u.Inodes, want, err)
	}
	if err := Remove(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// Files with several links count once, even if there are too many of them to
// remember.
func TestWithLinks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "0")
	if err := os.WriteFile(file, make([]byte, 60<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		if err := os.Link(file, filepath.Join(dir, fmt.Sprint(1+i))); err != nil {
			t.Fatal(err)
		}
	}
	few := Usage{linked: map[inode]bool{}}
	many := Usage{linked: map[inode]bool{}}
	for i := range uint64(maxLinked) {
		many.linked[inode{dev: 1 << 60, ino: i}] = true
	}
	if err := errors.Join(few.Add(dir), many.Add(dir)); err != nil {
		t.Fatal(err)
	}
	if few.Inodes != 2 || many.Inodes != 2 || len(many.linked) > maxLinked {
		t.Errorf("counted %d and %d files, %d are remembered", few.Inodes, many.Inodes, len(many.linked))
	}
	if few.Bytes < 60<<10 || many.Bytes > few.Bytes || many.Bytes+7 < few.Bytes {
		t.Errorf("counted %d and %d bytes", few.Bytes, many.Bytes)
	}
}
