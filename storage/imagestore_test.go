package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/test/kit/image"
)

// apart has images in a directory of their own.
func apart(o *Options) { o.ImageStore = filepath.Join(filepath.Dir(o.StateDir), "images") }

// With an imagestore, images and artifacts, their records and what is being pulled are in
// it, and what belongs to containers is in the graph root.
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

// earlier has images in the graph root, as from before there was an imagestore.
func earlier(t *testing.T, refs ...string) func(*Options) {
	return func(o *Options) {
		for _, ref := range refs {
			to := fmt.Sprintf("containers-storage:[overlay@%s+%s]%s", o.Root, o.RunRoot, ref)
			if out, err := skopeo(t, "copy", "-q", "--src-tls-verify=false", "docker://"+ref, to); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		ok(t, unix.Unmount(filepath.Join(o.Root, "overlay"), unix.MNT_DETACH)) // which skopeo leaves
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

// A tag of an image from before the imagestore that has moved is the new image's alone.
func TestTagMovedIntoTheImagestore(t *testing.T) {
	t.Parallel()
	r := serve(t, "app", "1", motd(t, "old"))
	name := r.Addr() + "/app:1"
	n := newNode(t, apart, earlier(t, name))
	old := n.list()[0]
	r.Push("app", "1", motd(t, "new"))
	img := n.pull(name)
	for _, listed := range n.list() {
		if has := slices.Contains(listed.RepoTags, name); has != (listed.ID == img.ID) {
			t.Errorf("image %s, old %s, new %s: tags %q", listed.ID, old.ID, img.ID, listed.RepoTags)
		}
	}
	n.remove(old.ID)
	if list := n.list(); len(list) != 1 || list[0].ID != img.ID {
		t.Errorf("%+v", list)
	}
}

// An image from before the imagestore gets another name, and is removed while in use as
// any other.
func TestImageInGraphRootAndImagestore(t *testing.T) {
	t.Parallel()
	r := serve(t, "app", "1", motd(t, "x"))
	r.Push("app", "2", motd(t, "x"))
	n := newNode(t, apart, earlier(t, r.Addr()+"/app:1"))
	n.holds.grace = 0
	img := n.pull(r.Addr() + "/app:2")
	if list := n.list(); len(list) != 1 || list[0].Pinned || !slices.Contains(list[0].RepoTags, r.Addr()+"/app:2") {
		t.Errorf("%+v", list)
	}
	found, err := n.Image(testContext(t), r.Addr()+"/app:2")
	if err != nil || found == nil || found.ID != img.ID {
		t.Errorf("by its new name: %+v, %v", found, err)
	}
	c := n.rootfs("c", img.ID)
	n.mount(c)
	n.remove(img.ID)
	if list := n.list(); len(list) != 0 {
		t.Errorf("removed, and listed: %+v", list)
	}
	if n.read(c, "etc/motd") != "x" {
		t.Error("wrong content")
	}
	n.removeRootfs(c)
	n.empty()
}

// Without another name, too, an image from before the imagestore is removed while in use.
func TestUsedImageFromBeforeTheImagestoreIsRemoved(t *testing.T) {
	t.Parallel()
	r := serve(t, "app", "1", motd(t, "x"))
	n := newNode(t, apart, earlier(t, r.Addr()+"/app:1"))
	n.holds.grace = 0
	img := n.list()[0]
	c := n.rootfs("c", img.ID)
	n.mount(c)
	n.remove(img.ID)
	if list := n.list(); len(list) != 0 {
		t.Errorf("removed, and listed: %+v", list)
	}
	n.removeRootfs(c)
	n.empty()
}

// An image is read-only where one of its records is, and not because other images are.
func TestRecordsInSeveralStores(t *testing.T) {
	all := inAllStores([]cstorage.Image{
		{ID: "both", Names: []string{"new"}}, // imagestore
		{ID: "both", Names: []string{"old"}}, {ID: "earlier", Names: []string{"new", "other"}},
		{ID: "earlier", ReadOnly: true, Names: []string{"third"}}, {ID: "far", ReadOnly: true, Names: []string{"other"}},
	})
	var got []string
	for _, r := range all {
		got = append(got, fmt.Sprintf("%s%s%t", r.ID, r.Names, r.ReadOnly))
	}
	if want := []string{"both[new]false", "earlier[other third]true", "far[]true"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if pulledUp := all[1]; sameRecord(&pulledUp, &cstorage.Image{ID: "earlier", Names: pulledUp.Names}) {
		t.Error("a record in a read-only store is taken for one that can be removed")
	}
}

// Images in the imagestore and from before it may stand on the same layers, which stay for
// as long as one of the images is there.
func TestLayersSharedWithTheImagestore(t *testing.T) {
	t.Parallel()
	low := layer(t, image.Dir("etc"), image.Text("etc/motd", "base"))
	base := build(t, image.Image{Layers: []image.Layer{low}})
	app := build(t, image.Image{Layers: []image.Layer{low, layer(t, image.Text("app", "app"))}})
	r := serve(t, "base", "1", base)
	r.Push("app", "1", app)
	for first, second := range map[string]string{"base": "app", "app": "base"} {
		for _, goes := range []string{first, second} {
			t.Run(fmt.Sprintf("%s of %s and %s", goes, first, second), func(t *testing.T) {
				t.Parallel()
				n := newNode(t, apart, earlier(t, r.Addr()+"/"+first+":1"))
				n.holds.grace = 0
				images := map[string]*Image{first: n.list()[0], second: n.pull(r.Addr() + "/" + second + ":1")}
				n.remove(images[goes].ID)
				delete(images, goes)
				for _, img := range images {
					c := n.rootfs("c", img.ID)
					n.mount(c)
					if n.read(c, "etc/motd") != "base" {
						t.Error("wrong content")
					}
					n.removeRootfs(c)
					if layers := n.layerIDs(); len(layers) != len(n.chain(img)) {
						t.Errorf("layers %q are left, of an image with %q", layers, n.chain(img))
					}
					n.remove(img.ID)
				}
				n.empty()
			})
		}
	}
}

// A removal that was cut short leaves no layer that it had made to keep those of others.
func TestRemovalCutShort(t *testing.T) {
	t.Parallel()
	n := newNode(t, apart)
	img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
	record, err := n.store.Image(img.ID)
	ok(t, err)
	layers := durable.LayersOf(n.store, record)
	_, err = n.store.CreateLayer(layers[0], img.topLayer, nil, "", false, nil)
	ok(t, err)
	job, err := n.leftovers.BeginRemoval(t.Context(), layers)
	ok(t, err)
	job.End(t.Context(), false)
	if left := n.layerIDs(); len(left) != len(n.chain(img)) {
		t.Errorf("layers %q, of an image with %q", left, n.chain(img))
	}
}

// What a power cut has done to the records and layers in an imagestore is noticed and
// mended as in a graph root.
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
		s, err := Open(t.Context(), n.cfg)
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

// A manifest vouches for nothing in another imagestore than the one that it was written
// for: the next boot reads what is there.
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

// Two crius whose graph roots differ may not have one imagestore: neither knows what the
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
	if _, err := Open(t.Context(), cfg); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "is the graph root itself") {
		t.Error(err)
	}
}
