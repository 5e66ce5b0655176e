package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/image"
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

func checkOwner(t *testing.T, path string, uid, gid uint32) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Error(&os.PathError{Op: "lstat", Path: path, Err: err})
	} else if st.Uid != uid || st.Gid != gid {
		t.Errorf("%s belongs to %d:%d, want %d:%d", path, st.Uid, st.Gid, uid, gid)
	}
}

// Pods with different user namespaces, and one without, share the layers of
// one image; each sees its own root as their owner.
func TestRootfsInUserNamespaces(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{
		layer(t, image.Dir("etc"), image.Text("etc/passwd", "root\n")),
		layer(t, image.Text("etc/group", "root\n"), image.Regular("su", 0o4755, []byte("#!"))),
	}}))
	for _, first := range []uint32{0, 100000, 300000} {
		r := n.rootfs(fmt.Sprint("c", first), img.ID)
		if first > 0 {
			r.UserNS = userNS(t, first)
		}
		n.mount(r)
		for _, name := range []string{".", "etc", "etc/passwd", "etc/group", "su"} {
			checkOwner(t, filepath.Join(r.Target, name), first, first)
		}
		// What root of the namespace changes remains its own.
		passwd := filepath.Join(r.Target, "etc/passwd")
		if err := errors.Join(os.WriteFile(passwd, []byte("new"), 0o644), unix.Chmod(filepath.Join(r.Target, "su"), 0o4711)); err != nil {
			t.Error(err)
		}
		checkOwner(t, passwd, first, first)
		if st, err := os.Stat(filepath.Join(r.Target, "su")); err != nil || st.Mode()&os.ModeSetuid == 0 {
			t.Errorf("setuid file: %v, %v", st, err)
		}
		if err := n.UnmountRootfs(r); err != nil {
			t.Error(err)
		}
		n.mount(r) // and the writable layer, when it is mounted once more
		checkOwner(t, passwd, first, first)
		if mounts := mountsBelow(t, filepath.Dir(r.Target)); len(mounts) != 1 {
			t.Errorf("mounted: %q", mounts)
		}
		n.removeRootfs(r)
	}
}

// An image without layers has an empty root directory, and that too is root's.
func TestEmptyRootfsInUserNamespace(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{}))
	r := n.rootfs("c", img.ID)
	r.UserNS = userNS(t, 100000)
	n.mount(r)
	checkOwner(t, r.Target, 100000, 100000)
	n.removeRootfs(r)
}

func TestCheckMapping(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if err := n.CheckMapping(userNS(t, 100000)); err != nil {
		t.Error(err)
	}
	if err := n.CheckMapping("/none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no user namespace: %v", err)
	}
}
