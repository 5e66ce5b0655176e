package mount

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// directory makes a directory with a file in it.
func directory(t *testing.T, path ...string) (dir, file string) {
	t.Helper()
	dir = filepath.Join(path...)
	file = filepath.Join(dir, "file")
	must(t, os.MkdirAll(dir, 0o700))
	must(t, os.WriteFile(file, nil, 0o600))
	return dir, file
}

// exists reports whether there is a file.
func exists(t *testing.T, file string) bool {
	t.Helper()
	_, err := os.Lstat(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	return err == nil
}

// Names may have all bytes but a slash, and what the mount table uses by itself.
func TestRemoveTreeWithStrangeNames(t *testing.T) {
	t.Parallel()
	base := scratch(t)
	source, file := directory(t, base, "source")
	for _, name := range []string{"a b", `a\040b`, "a //deleted", "a\nb", "a\r", "a - b", "\xff\xfe", "#a", `\`, "a\t"} {
		dir := filepath.Join(base, "dir")
		point, _ := directory(t, dir, name)
		must(t, unix.Mount(source, point, "", unix.MS_BIND, ""))
		if err := RemoveTree(dir); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		if exists(t, dir) || !exists(t, file) {
			t.Fatalf("%q: still there, or what was mounted is gone", name)
		}
	}
}

// What is mounted in a directory stays mounted there if the directory is mounted elsewhere too, as volumes of the
// node are in directories of runtimes.
func TestUnmountBelowKeepsWhatPeersHave(t *testing.T) {
	t.Parallel()
	base := scratch(t)
	must(t, unix.Mount(base, base, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = UnmountBelow(base) })
	must(t, unix.Mount("", base, "", unix.MS_SHARED, ""))
	within, _ := directory(t, base, "source", "within")
	tmpfs(t, within)
	point, _ := directory(t, base, "dir", "point")
	for range 2 { // one on the other
		must(t, unix.Mount(filepath.Dir(within), point, "", unix.MS_BIND|unix.MS_REC, ""))
	}
	if points, err := Under(point); err != nil || len(points) < 4 {
		t.Fatalf("mounted: %q, %v", points, err)
	}
	must(t, UnmountBelow(filepath.Dir(point)))
	if points, err := Under(filepath.Dir(point)); err != nil || len(points) != 0 {
		t.Errorf("left mounted: %q, %v", points, err)
	}
	if mounted, err := Mounted(within); !mounted || err != nil {
		t.Errorf("it was unmounted at its source as well: %v", err)
	}
}

// A path of the mount table may lead through a link by now: in what hides the mount, or where its parent was mounted.
func TestUnmountBelowFollowsNoLink(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]bool{"hidden": true, "unmounted with its parent": false} {
		base := scratch(t)
		other, _ := directory(t, base, "other", "y")
		tmpfs(t, other)
		t.Cleanup(func() { _ = Unmount(other) })
		volume, _ := directory(t, base, "volume")
		dir, _ := directory(t, base, "dir", "volume")
		point := filepath.Join(dir, "x", "y")
		below, above := dir, volume
		if !first {
			below, above = volume, dir
		}
		directory(t, below, "x", "y")
		must(t, os.Symlink(filepath.Dir(other), filepath.Join(above, "x")))
		if first {
			tmpfs(t, point)
		}
		must(t, unix.Mount(volume, dir, "", unix.MS_BIND, ""))
		if !first {
			tmpfs(t, point)
		}
		if err := RemoveTree(filepath.Dir(dir)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if mounted, err := Mounted(other); !mounted || err != nil {
			t.Errorf("%s: something was unmounted that only a link leads to: %v", name, err)
		}
	}
}

// What is mounted while a directory is being removed is not entered.
func TestRemoveStopsAtMounts(t *testing.T) {
	t.Parallel()
	base := scratch(t)
	source, file := directory(t, base, "source")
	point, _ := directory(t, base, "dir", "point")
	must(t, os.Symlink(source, filepath.Join(base, "dir", "link")))
	must(t, unix.Mount(source, point, "", unix.MS_BIND, ""))
	parent, err := os.Open(base)
	must(t, err)
	defer parent.Close()
	for range 2 {
		if err := removeAt(parent, "dir"); !errors.Is(err, unix.EBUSY) {
			t.Errorf("something is mounted: %v", err)
		}
	}
	must(t, Unmount(point))
	if err := removeAt(parent, "dir"); err != nil || exists(t, filepath.Dir(point)) {
		t.Errorf("still there: %v", err)
	}
	if !exists(t, file) {
		t.Error("what was mounted was deleted")
	}
}

// A directory on which something is mounted is no way into what is mounted.
func TestRemoveAllKeepsWhatIsMounted(t *testing.T) {
	t.Parallel()
	base := scratch(t)
	source, file := directory(t, base, "source")
	point, _ := directory(t, base, "dir", "point")
	must(t, unix.Mount(source, point, "", unix.MS_BIND, ""))
	for range 2 { // also once it is gone
		if err := RemoveAll(filepath.Dir(point)); err != nil {
			t.Error(err)
		}
	}
	if err := RemoveAll(point); err != nil {
		t.Errorf("in a directory that is gone: %v", err)
	}
	if exists(t, filepath.Dir(point)) || !exists(t, file) {
		t.Error("still there, or what was mounted is gone")
	}
}
