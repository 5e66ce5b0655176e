package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
)

// userNS is the path of a user namespace whose ids begin with first.
func userNS(t *testing.T, first uint32) string {
	t.Helper()
	ids := []ns.IDMap{{Container: 0, Host: first, Size: 65536}}
	s := ns.Spec{Dir: t.TempDir(), Name: fmt.Sprint(first), UIDs: ids, GIDs: ids}
	set, err := ns.Create(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ns.Remove(s); err != nil {
			t.Error(err)
		}
	})
	return set.User
}

func checkOwner(t *testing.T, path string, id uint32) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Error(&os.PathError{Op: "lstat", Path: path, Err: err})
	} else if st.Uid != id || st.Gid != id {
		t.Errorf("%s belongs to %d:%d, want %d:%d", path, st.Uid, st.Gid, id, id)
	}
}

func checkMounts(t *testing.T, dir string, want int) {
	t.Helper()
	if mounts, err := mount.Under(dir); err != nil || len(mounts) != want {
		t.Errorf("mounted below %s: %q, %v; want %d", dir, mounts, err, want)
	}
}

// Both ways of mounting work on a thread with its own mounts, also where the
// kernel takes one page of options.
func TestMapped(t *testing.T) {
	t.Parallel()
	users := userNS(t, 200000)
	for name, mount := range map[string]func(Mount) error{"by context": Mount.mountByContext, "by string": Mount.mountByString} {
		for _, layers := range []int{1, 120} {
			o := stack(t, t.TempDir(), layers)
			o.private = true
			if err := mapped(users, o.Lower, o.Target, func() error { return mount(o) }); err != nil {
				t.Errorf("%s, %d layers: %v", name, layers, err)
				continue
			}
			for i := range layers {
				checkOwner(t, filepath.Join(o.Target, fmt.Sprintf("only%d", i)), 200000)
			}
			checkOwner(t, filepath.Join(o.Lower[0], "all"), 0)
			checkMounts(t, filepath.Dir(o.Target), 1)
			if err := unix.Unmount(o.Target, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestMappedErrors(t *testing.T) {
	t.Parallel()
	o := stack(t, t.TempDir(), 1)
	o.private = true
	users := userNS(t, 100000)
	if err := mapped("/none", o.Lower, o.Target, o.mount); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no user namespace: %v", err)
	}
	// proc cannot be id-mapped.
	if err := mapped(users, []string{"/proc"}, o.Target, o.mount); !errors.Is(err, fault.Unimplemented) {
		t.Errorf("file system without id-mapped mounts: %v", err)
	}
	failing := errors.New("failing")
	if err := mapped(users, o.Lower, o.Target, func() error { return failing }); !errors.Is(err, failing) {
		t.Errorf("mount fails: %v", err)
	}
	checkMounts(t, filepath.Dir(o.Target), 0)
}
