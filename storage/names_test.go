package storage

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/wait"
)

// A name is bytes. Images, containers, and the code that measures and removes them accept any
// bytes.
func TestNamesAreBytes_storage_1878(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	odd := "\xff\xfe\n\x01\\ \""
	files := []image.File{
		image.Dir("d"), image.Dir("d/" + odd), image.Dir("d/" + odd + "/" + odd), image.Text("d/"+odd+"/"+odd+"/"+odd, "found"),
		image.Text("d/hidden"+odd, "x"), image.Symlink("l"+odd, "d/"+odd), image.Hardlink("h"+odd, "d/hidden"+odd),
	}
	odds := layer(t, files...)
	r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{odds, layer(t, image.Whiteout("d/hidden"+odd), image.Dir(odd))}}))
	r.Push("app", "2", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("base", "x")), odds}})) // from the store
	for _, tag := range []string{"1", "2"} {
		img := n.pull(r.Addr() + "/app:" + tag)
		n.cutPower(true, func() {}) // reads all layers
		if len(n.list()) == 0 {
			t.Fatal("the image was taken for damaged")
		}
		c := n.rootfs(tag, img.ID)
		n.mount(c)
		if got := n.read(c, "l"+odd+"/"+odd+"/"+odd); got != "found" {
			t.Errorf("read %q", got)
		}
		if _, err := os.Lstat(filepath.Join(c.Target, "d/hidden"+odd)); (tag == "1") != os.IsNotExist(err) {
			t.Errorf("%s: %v", tag, err)
		}
		ok(t, os.MkdirAll(filepath.Join(c.Target, odd, odd), 0o755))
		ok(t, os.WriteFile(filepath.Join(c.Target, odd, odd, odd), []byte("x"), 0o600))
		if usage, err := n.RootfsUsage(c); err != nil || usage.InodesUsed < 3 {
			t.Errorf("usage %+v, %v", usage, err)
		}
		n.removeRootfs(c)
		n.remove(img.ID)
	}
	n.empty()
}

// What only has the name of a staging directory stops no sweep, and nothing is deleted or waited for through it.
func TestPosingStagedLayers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	elsewhere := t.TempDir()
	precious := filepath.Join(elsewhere, "dir")
	ok(t, os.WriteFile(precious, []byte("x"), 0o600))
	place := filepath.Join(n.cfg.Root, "overlay/tempdirs/crius-unpack-")
	ok(t, os.MkdirAll(place+"1/dir", 0o700))
	ok(t, os.Symlink(elsewhere, place+"2"))
	ok(t, os.WriteFile(place+"3", nil, 0o600))
	ok(t, os.MkdirAll(place+"4/dir", 0o700))
	ok(t, unix.Mkfifo(place+"4/staging.lock", 0o600))
	ok(t, os.MkdirAll(place+"5/dir", 0o700))
	ok(t, os.Symlink("/dev/tty", place+"5/staging.lock"))
	bad := build(t, image.Image{Layers: []image.Layer{image.RawLayer(make([]byte, 700))}})
	if _, err := n.Pull(testContext(t), PullRequest{Image: serve(t, "app", "1", bad).Addr() + "/app:1"}); err == nil {
		t.Fatal("half a tar was pulled")
	}
	wait.For(t, "the directories to be deleted", func() bool { return len(n.entries("root/overlay/tempdirs")) == 2 })
	for _, kept := range []string{precious, place + "2", place + "3"} {
		if _, err := os.Lstat(kept); err != nil {
			t.Error(err)
		}
	}
}

// A worker that dies while it unpacks a layer with such names leaves no files for good.
func TestStagedLayersAreSwept(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, place := range []string{"overlay/tempdirs/crius-unpack-", "overlay/staging/"} { // of this version, and of earlier ones
		place = filepath.Join(n.cfg.Root, place)
		ok(t, os.MkdirAll(place+"123/dir", 0o700))
		ok(t, os.WriteFile(place+"123/staging.lock", nil, 0o600))
		for _, unlocked := range []string{"1/dir", "2/dir/file", "3"} { // the lock is made later
			ok(t, os.MkdirAll(place+unlocked, 0o700))
		}
	}
	bad := build(t, image.Image{Layers: []image.Layer{image.RawLayer(make([]byte, 700))}})
	if _, err := n.Pull(testContext(t), PullRequest{Image: serve(t, "app", "1", bad).Addr() + "/app:1"}); err == nil {
		t.Fatal("half a tar was pulled")
	}
	wait.For(t, "the directories to be deleted", func() bool {
		return len(n.entries("root/overlay/staging"))+len(n.entries("root/overlay/tempdirs")) == 0
	})
}

// What could not be deleted after a pull that succeeded, whose job is gone, goes at the next start.
func TestStartSweepsWhatNoJobRemembers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ok(t, os.MkdirAll(filepath.Join(n.cfg.Root, "crius-pulls"), 0o700)) // there has been a pull
	ok(t, os.MkdirAll(filepath.Join(n.cfg.Root, "overlay/tempdirs/crius-unpack-7/1"), 0o700))
	ok(t, os.WriteFile(filepath.Join(n.cfg.Root, "overlay/tempdirs/crius-unpack-7/staging.lock"), nil, 0o600))
	n.restart()
	if left := n.entries("root/overlay/tempdirs"); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}
