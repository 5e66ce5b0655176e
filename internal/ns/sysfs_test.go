package ns

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// mountIn mounts the sysfs of the network namespace pinned at path on a new directory.
func mountIn(t *testing.T, path, dir string, flags uintptr) {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Do(path, func() error { return unix.Mount("sysfs", dir, "sysfs", flags, "") }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

func readOnly(t *testing.T, dir string) bool {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return st.Flags&unix.ST_RDONLY != 0
}

func TestWritableSysfsHoldsWhoeverMountedItFirst(t *testing.T) {
	t.Parallel()
	for name, users := range map[string][]IDMap{"node's users": nil, "user namespace": {{0, 100000, 65536}}} {
		for _, first := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := spec(t)
				s.UIDs, s.GIDs = users, users
				path := create(t, s).Net
				t.Cleanup(func() { remove(t, s) })
				dir := t.TempDir()
				before, writable, after := filepath.Join(dir, "before"), filepath.Join(dir, "writable"), filepath.Join(dir, "after")
				if first {
					mountIn(t, path, before, unix.MS_RDONLY)
				}
				hold, err := WritableSysfs(path)
				if err != nil {
					t.Fatal(err)
				}
				mountIn(t, path, after, unix.MS_RDONLY)
				mountIn(t, path, writable, 0)
				if err := hold.Close(); err != nil {
					t.Fatal(err)
				}
				if readOnly(t, writable) {
					t.Error("a mount without ro is read-only")
				}
				if !readOnly(t, after) || first && !readOnly(t, before) {
					t.Error("a mount with ro is writable")
				}
			})
		}
	}
}

// Not parallel: a process that another test has just forked has a copy of the
// mount's descriptor until it executes its program.
func TestWritableSysfsLeavesNoMount(t *testing.T) {
	s := spec(t)
	path := create(t, s).Net
	hold, err := WritableSysfs(path)
	if err != nil {
		t.Fatal(err)
	}
	hold.Close()
	dir := filepath.Join(t.TempDir(), "sys")
	mountIn(t, path, dir, unix.MS_RDONLY)
	again := filepath.Join(t.TempDir(), "again")
	mountIn(t, path, again, 0)
	if !readOnly(t, again) {
		t.Error("the superblock of sysfs is alive although nothing is mounted any more")
	}
	remove(t, s)
}
