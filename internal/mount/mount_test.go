package mount

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

func tmpfs(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("test", path, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
}

// scratch returns a temporary directory below which no mount may be left.
func scratch(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Cleanup(func() {
		left, err := Under(dir)
		if err != nil || len(left) != 0 {
			t.Errorf("left mounted: %q, %v", left, err)
		}
		for _, point := range left {
			unix.Unmount(point, unix.MNT_DETACH)
		}
	})
	return dir
}

func TestUnmountStackedAndBusy(t *testing.T) {
	t.Parallel()
	path := filepath.Join(scratch(t), "m")
	tmpfs(t, path)
	tmpfs(t, path)
	tmpfs(t, path)
	busy, err := os.Create(filepath.Join(path, "open"))
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()

	for range 2 { // the second time there is nothing to do
		if err := Unmount(path); err != nil {
			t.Fatal(err)
		}
		if on, err := Mounted(path); on || err != nil {
			t.Fatalf("Mounted = %v, %v after Unmount", on, err)
		}
	}
	if _, err := busy.WriteString("x"); err != nil {
		t.Errorf("open file broken by a lazy unmount: %v", err)
	}
}

func TestNothingThere(t *testing.T) {
	t.Parallel()
	dir := scratch(t)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, file, filepath.Join(dir, "missing"), filepath.Join(file, "below")} {
		if on, err := Mounted(path); on || err != nil {
			t.Errorf("Mounted(%q) = %v, %v", path, on, err)
		}
		if err := Unmount(path); err != nil {
			t.Errorf("Unmount(%q) = %v", path, err)
		}
	}
}

// A symbolic link planted where a mount is expected must not redirect the
// unmount to its target.
func TestUnmountFollowsNoSymlink(t *testing.T) {
	t.Parallel()
	dir := scratch(t)
	victim, link := filepath.Join(dir, "victim"), filepath.Join(dir, "link")
	tmpfs(t, victim)
	if err := os.Symlink(victim, link); err != nil {
		t.Fatal(err)
	}
	if on, _ := Mounted(link); on {
		t.Error("a symbolic link to a mount point counts as mounted")
	}
	if err := Unmount(link); err != nil {
		t.Error(err)
	}
	if on, _ := Mounted(victim); !on {
		t.Error("the link's target was unmounted")
	}
	if err := Unmount(victim); err != nil {
		t.Error(err)
	}
}

func TestMountedAgreesWithTable(t *testing.T) {
	t.Parallel()
	dir := scratch(t)
	point := filepath.Join(dir, "a b\tc\\d\ne")
	tmpfs(t, point)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(file, file, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{point, file, dir} {
		byStatx, err1 := Mounted(path)
		byTable, err2 := listed(path)
		if err1 != nil || err2 != nil || byStatx != byTable || byStatx != (path != dir) {
			t.Errorf("%q: statx %v %v, table %v %v", path, byStatx, err1, byTable, err2)
		}
		if err := Unmount(path); err != nil {
			t.Error(err)
		}
	}
}

func TestUnderOrder(t *testing.T) {
	t.Parallel()
	dir := scratch(t)
	root := filepath.Join(dir, "pods")
	for _, p := range []string{"", "a", "a/b", "a", "a-c", "z"} { // the second a hides a/b
		tmpfs(t, filepath.Join(root, p))
	}
	neighbour := filepath.Join(dir, "pods-not")
	tmpfs(t, neighbour)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}

	points, err := Under(link)
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, p := range []string{"z", "a/b", "a-c", "a", "a", ""} {
		want = append(want, filepath.Join(root, p))
	}
	if !slices.Equal(points, want) {
		t.Errorf("Under = %q, want %q", points, want)
	}
	for _, p := range points {
		if err := Unmount(p); err != nil {
			t.Error(err)
		}
	}
	if points, err := Under(root); err != nil || len(points) != 0 {
		t.Errorf("unmounting all that was listed left %q, %v", points, err)
	}
	if points, err = Under(neighbour); err != nil || len(points) != 1 {
		t.Errorf("neighbour: %q, %v", points, err)
	}
	if err := Unmount(neighbour); err != nil {
		t.Error(err)
	}
	if points, err := Under(filepath.Join(dir, "missing")); err != nil || len(points) != 0 {
		t.Errorf("missing prefix: %q, %v", points, err)
	}
}

func TestShm(t *testing.T) {
	t.Parallel()
	path := filepath.Join(scratch(t), "shm")
	for range 2 { // a repetition must not stack a second one
		if err := Shm(path, 1<<20, ""); err != nil {
			t.Fatal(err)
		}
	}
	if points, err := Under(path); err != nil || len(points) != 1 {
		t.Fatalf("mounts: %q, %v", points, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o777 || info.Mode()&os.ModeSticky == 0 {
		t.Errorf("mode %v, %v; want 1777", info.Mode(), err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC || fs.Blocks*uint64(fs.Bsize) != 1<<20 {
		t.Errorf("type %#x, %d bytes, %v", fs.Type, fs.Blocks*uint64(fs.Bsize), err)
	}
	const want = unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC
	if fs.Flags&want != want {
		t.Errorf("flags %#x lack nosuid, nodev, noexec", fs.Flags)
	}
	if err := os.WriteFile(filepath.Join(path, "big"), make([]byte, 2<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing more than the size: %v, want ENOSPC", err)
	}
	if err := Unmount(path); err != nil {
		t.Error(err)
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	path := filepath.Join(scratch(t), "files")
	for range 2 { // a repetition must not stack a second one
		if err := Files(path, ""); err != nil {
			t.Fatal(err)
		}
	}
	if points, err := Under(path); err != nil || len(points) != 1 {
		t.Fatalf("mounts: %q, %v", points, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != os.ModeDir|0o700 {
		t.Errorf("mode %v, %v; want 0700", info.Mode(), err)
	}
	for _, name := range []string{"one", "two"} { // the first leaves nothing for the second
		err := os.WriteFile(filepath.Join(path, name), make([]byte, 1<<20), 0o600)
		if full := errors.Is(err, unix.ENOSPC); full != (name == "two") {
			t.Errorf("1 MiB into file %s: %v", name, err)
		}
	}
	for i := 0; ; i++ {
		err := os.WriteFile(filepath.Join(path, strconv.Itoa(i)), nil, 0o600)
		if errors.Is(err, unix.ENOSPC) {
			break
		}
		if err != nil || i > 16 {
			t.Fatalf("file %d: %v", i, err)
		}
	}
	if err := Unmount(path); err != nil {
		t.Error(err)
	}
}

func TestShmRejects(t *testing.T) {
	t.Parallel()
	path := filepath.Join(scratch(t), "shm")
	for _, c := range []struct {
		size  int64
		label string
	}{{0, ""}, {-1, ""}, {1 << 20, `a",size="9`}, {1 << 20, "a\nb"}, {1 << 20, "a\x00"}} {
		if err := Shm(path, c.size, c.label); !errors.Is(err, fault.Invalid) {
			t.Errorf("Shm(%d, %q) = %v, want fault.Invalid", c.size, c.label, err)
		}
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a rejected request left %s: %v", path, err)
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	const cgroup = `41 31 0:38 /a\040b /sys/fs/cgroup/x\134y rw,relatime shared:7 master:3 - cgroup none rw,cpu,cpuacct`
	want := Info{ID: 41, Flags: "rw,relatime", Device: "0:38", Root: "/a b", Point: `/sys/fs/cgroup/x\y`, Type: "cgroup", Source: "none", Options: "rw,cpu,cpuacct", Shared: true, Slave: true}
	if got, ok := parse(cgroup); !ok || got != want {
		t.Errorf("parse = %+v, %v", got, ok)
	}
	if got, ok := parse(strings.Replace(cgroup, "rw,relatime", "ro,relatime", 1)); !ok || !got.ReadOnly {
		t.Errorf("read-only: %+v, %v", got, ok)
	}
	for _, bad := range []string{"", " - ", "a b c d e f", "1 2 3 - x", "1 2 0:1 / /p rw - tmpfs"} {
		if got, ok := parse(bad); ok {
			t.Errorf("parse(%q) = %+v", bad, got)
		}
	}
}

func TestOf(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := Shm(dir, 1<<20, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Unmount(dir) })
	for _, path := range []string{dir, dir + "/", dir + "/below/../x"} {
		m, err := Of(path)
		if err != nil || m.Point != dir || m.Type != "tmpfs" || m.Slave {
			t.Errorf("Of(%s) = %+v, %v", path, m, err)
		}
	}
	if m, err := Of(dir + "x"); err != nil || m.Point == dir {
		t.Errorf("Of(%sx) = %+v, %v", dir, m, err)
	}
	if err := unix.Mount("", dir, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	if m, err := Of(dir); err != nil || !m.Shared {
		t.Errorf("shared: %+v, %v", m, err)
	}
}

// A directory is the same one whichever mount leads to it.
func TestPlaces(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := Shm(dir, 1<<20, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Unmount(dir) })
	at := func(path string) Place {
		place, err := PlaceOf(path)
		if err != nil {
			t.Fatal(err)
		}
		return place
	}
	for _, name := range []string{"a", "a/b", "ab", "alias"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	alias := filepath.Join(dir, "alias")
	if err := unix.Mount(filepath.Join(dir, "a"), alias, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Unmount(alias) })
	a, b := at(filepath.Join(dir, "a")), at(filepath.Join(alias, "b"))
	if b != at(filepath.Join(dir, "a/b")) || !a.Holds(b) || !a.Holds(a) || !at(dir).Holds(b) {
		t.Errorf("%v does not hold %v", a, b)
	}
	if b.Holds(a) || a.Holds(at(filepath.Join(dir, "ab"))) || at(filepath.Dir(dir)).Holds(a) {
		t.Errorf("%v is held by what it is not in", a)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`41 31 0:38 / /sys rw - cgroup none rw`)
	f.Add(`41 31 0:38 / /s\04 rw - a  b\777`)
	f.Fuzz(func(t *testing.T, line string) {
		m, ok := parse(line)
		if ok && strings.Contains(m.Type, " ") {
			t.Errorf("%q: type %q", line, m.Type)
		}
	})
}

// A killed runtime leaves files with something mounted on them.
func TestRemoveAll(t *testing.T) {
	dir := filepath.Join(scratch(t), "dir")
	file := filepath.Join(dir, "below", "file")
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := unix.Mount("/proc/self/exe", file, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // also once it is gone
		if err := RemoveAll(dir); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("still there: %v", err)
		}
	}
}

// What is mounted in the directory, also on another directory and more than once,
// is unmounted and not deleted.
func TestRemoveTree(t *testing.T) {
	base := scratch(t)
	source, dir := filepath.Join(base, "source"), filepath.Join(base, "dir")
	file, point := filepath.Join(source, "file"), filepath.Join(dir, "below", "point")
	for _, d := range []string{source, point} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := unix.Mount(source, point, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(base, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if err := RemoveTree(link); err != nil {
		t.Error(err)
	}
	if mounted, err := Mounted(point); err != nil || !mounted {
		t.Errorf("mounted below the target of a link: %v, %v", mounted, err)
	}
	for range 2 { // also once it is gone
		if err := RemoveTree(dir); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("still there: %v", err)
		}
	}
	if _, err := os.Lstat(file); err != nil {
		t.Errorf("what was mounted: %v", err)
	}
}
