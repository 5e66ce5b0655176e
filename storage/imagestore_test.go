package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// apart has images in a directory of their own.
func apart(o *Options) { o.ImageStore = filepath.Join(filepath.Dir(o.StateDir), "images") }

// With an imagestore, images and artifacts, their records and downloads are in it, and files of
// containers are in the graph root.
func TestImagestore(t *testing.T) {
	t.Parallel()
	n := newNode(t, apart)
	r := serve(t, "app", "1", motd(t, "hello"))
	img := n.pull(r.Addr() + "/app:1")
	c := n.rootfs("c", img.ID)
	n.mount(c)
	if n.read(c, "etc/motd") != "hello" {
		t.Error("wrong content")
	}
	images, containers, err := n.FsInfo(testContext(t))
	if err != nil || images.Mountpoint != n.cfg.ImageStore || images.UsedBytes == 0 || containers.Mountpoint != n.containersDir {
		t.Errorf("images %+v, containers %+v, %v", images, containers, err)
	}
	for _, id := range n.chain(img) {
		if !slices.Contains(n.entries("images/overlay"), id) || slices.Contains(n.entries("root/overlay"), id) {
			t.Errorf("layer %s is not in the imagestore alone", id)
		}
	}
	if !slices.Contains(n.entries("images"), "crius.reserve") {
		t.Error("no space is kept in the imagestore for removals")
	}
	r.Push("models/one", "1", model(t, "weights"))
	weights := n.pull(r.Addr() + "/models/one:1")
	if !slices.Contains(n.entries("images/crius-artifacts/artifacts"), weights.ID) {
		t.Errorf("artifact %s is not in the imagestore", weights.ID)
	}
	n.remove(weights.ID)
	n.restart()
	if list := n.list(); len(list) != 1 || list[0].ID != img.ID {
		t.Errorf("after a restart: %+v", list)
	}
	n.removeRootfs(c)
	n.remove(img.ID)
	n.empty()
	for _, place := range []string{"images/overlay-images", "images/overlay"} {
		for _, name := range n.entries(place) {
			if len(name) == 64 {
				t.Errorf("left behind: %s/%s", place, name)
			}
		}
	}
	if err := n.Forget(); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Concat(n.entries("images"), n.entries("root")) {
		if strings.HasPrefix(name, "crius") {
			t.Errorf("forgotten, and still there: %s", name)
		}
	}
}

// Images from before there was an imagestore stay, and can be run and removed.
func TestImagesFromBeforeTheImagestore(t *testing.T) {
	t.Parallel()
	r := serve(t, "app", "1", motd(t, "old"))
	n := newNode(t, apart, earlier(t, r.Addr()+"/app:1"))
	old, err := n.Image(testContext(t), r.Addr()+"/app:1")
	if err != nil || old == nil || old.Pinned {
		t.Fatalf("%+v, %v", old, err)
	}
	c := n.rootfs("c", old.ID)
	n.mount(c)
	if n.read(c, "etc/motd") != "old" {
		t.Error("wrong content")
	}
	n.removeRootfs(c)
	n.remove(old.ID)
	again := n.pull(r.Addr() + "/app:1")
	if id := n.chain(again)[0]; !slices.Contains(n.entries("images/overlay"), id) || slices.Contains(n.entries("root/overlay"), id) {
		t.Errorf("layer %s is not in the imagestore", id)
	}
	n.remove(again.ID)
	n.empty()
}

// Damage of a power cut to the records and layers in an imagestore is detected and repaired as in a
// graph root.
func TestPowerCutOnImagestore(t *testing.T) {
	t.Parallel()
	for name, bad := range map[string]string{imagesRecords: "", layersFile: `[{"id":"abc`} {
		t.Run(filepath.Base(name), func(t *testing.T) {
			t.Parallel()
			n := newNode(t, synced, apart)
			img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
			path := filepath.Join(n.cfg.ImageStore, name)
			n.cutPower(false, func() { ok(t, os.WriteFile(path, []byte(bad), 0o600)) })
			if list := n.list(); len(list) != 1 || list[0].ID != img.ID {
				t.Errorf("images: %+v", list)
			}
			if aside, err := os.ReadFile(path + ".damaged"); err != nil || string(aside) != bad {
				t.Errorf("the damaged file is now %q, %v", aside, err)
			}
			defects, err := n.Verify(t.Context(), nil)
			if err != nil || len(defects) != 1 || defects[0].Object != "record file "+path+".damaged" {
				t.Errorf("%+v, %v", defects, err)
			}
			ok(t, os.Remove(path+".damaged"))
		})
	}
	t.Run("layer", func(t *testing.T) {
		t.Parallel()
		n := newNode(t, synced, apart)
		img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
		sound := n.pull(serve(t, "app", "1", motd(t, "y")).Addr() + "/app:1")
		top, tmp := n.chain(img)[0], filepath.Join(n.cfg.ImageStore, "overlay-images/.tmp-images.json1")
		n.cutPower(false, func() {
			ok(t, os.WriteFile(tmp, nil, 0o600))
			truncate(t, filepath.Join(n.cfg.ImageStore, "overlay", top, "diff/etc/motd"))
		})
		if list := n.list(); len(list) != 2 { // what is in the manifest is not read
			t.Errorf("images: %+v", list)
		}
		n.cutPower(true, func() {})
		if list := n.list(); len(list) != 1 || list[0].ID != sound.ID {
			t.Errorf("images with a damaged layer: %+v", list)
		}
		if _, err := os.Lstat(tmp); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("half-written records: %v", err)
		}
	})
}

// A store whose imagestore is not mounted yet is not opened, and nothing is written below
// the mount point.
func TestImagestoreIsNotMounted(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced, apart)
	img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
	ok(t, n.Close(t.Context()))
	mounted := n.cfg.ImageStore + ".mounted"
	ok(t, errors.Join(os.Rename(n.cfg.ImageStore, mounted), os.Mkdir(n.cfg.ImageStore, 0o700)))
	for _, n.cfg.ReadOnly = range []bool{true, false} {
		s, err := openStore(t.Context(), n.cfg)
		if err == nil {
			err = errors.Join(errors.New("opened"), s.Close(t.Context()))
		}
		if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "mount its file system") || len(n.entries("images")) > 0 {
			t.Errorf("read-only %t: %v; in the directory: %q", n.cfg.ReadOnly, err, n.entries("images"))
		}
	}
	ok(t, errors.Join(os.Remove(n.cfg.ImageStore), os.Rename(mounted, n.cfg.ImageStore)))
	n.open()
	if list := n.list(); len(list) != 1 || list[0].ID != img.ID {
		t.Errorf("mounted: %+v", list)
	}
}

// A manifest says nothing about an imagestore for which it was not written: the next boot reads the
// layers there.
func TestManifestOfAnotherImagestore(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced, apart)
	img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
	layers := n.chain(img)
	ok(t, n.Close(t.Context()))
	last := n.stored()
	if last.Images != n.cfg.ImageStore || len(last.Unsure) > 0 {
		t.Errorf("manifest of %s, unsure of %v", last.Images, last.Unsure)
	}
	last.Images = "/elsewhere"
	n.putManifest(last)
	n.open()
	now := n.stored()
	if now.Images != n.cfg.ImageStore || len(now.Unsure) != len(layers) {
		t.Errorf("manifest of %s, unsure of %v", now.Images, now.Unsure)
	}
	n.cutPower(false, func() { truncate(t, filepath.Join(n.cfg.ImageStore, "overlay", layers[0], "diff/etc/motd")) })
	if list := n.list(); len(list) != 0 {
		t.Errorf("a damaged image is listed: %+v", list)
	}
}

const imagesRecords = "overlay-images/images.json"

// Two crius with different graph roots may not share an imagestore: neither knows which images the
// other's containers use.
func TestSecondOwnerOfImagestoreIsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, apart)
	img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
	r := n.rootfs("a", img.ID)
	n.mount(r)
	other := n.cfg
	other.StateDir, other.Root = filepath.Join(n.dir, "other"), filepath.Join(n.dir, "other root")
	said := n.childFails("own", other)
	for _, want := range []string{"open image store " + n.cfg.ImageStore, "in use by", n.cfg.StateDir, "image.imagestore"} {
		if !strings.Contains(said, want) {
			t.Errorf("said %q, without %q", said, want)
		}
	}
	n.removeRootfs(r)
}

// An imagestore that another crius has taken is named, with its option.
func TestLostImagestore(t *testing.T) {
	t.Parallel()
	n := newNode(t, apart)
	lock, other := filepath.Join(n.cfg.ImageStore, ownerName), t.TempDir()
	ok(t, os.MkdirAll(filepath.Join(other, "containers", strings.Repeat("a", 64)), 0o700))
	ok(t, os.Rename(lock, lock+".old"))
	ok(t, os.WriteFile(lock, []byte(fmt.Sprintf(`{"root": %q}`, other)), 0o600))
	err := n.holds.taken()
	for _, want := range []string{"image store " + n.cfg.ImageStore, other, "different image.imagestore"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, without %q", err, want)
		}
	}
	ok(t, os.Rename(lock+".old", lock))
}

func TestImagestoreIsNoGraphRoot(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	cfg := n.cfg
	cfg.ImageStore = cfg.Root
	if _, err := openStore(t.Context(), cfg); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "is the graph root itself") {
		t.Error(err)
	}
}
