package storage

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/test/kit/image"
)

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

// An image from before the imagestore gets another name, and is not removed while in use, as any
// other.
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
	n.keepsInUse(img.ID, 1, c)
	n.removeRootfs(c)
	n.remove(img.ID)
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

// A removal that is interrupted leaves no layer that it has made to protect those of other images.
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

// Artifacts from before there was an imagestore go with the last container that mounts one,
// unless they are used as an additional store.
func TestArtifactsFromBeforeTheImagestore(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "models/one", "1", model(t, "weights"))
	weights := n.pull(r.Addr() + "/models/one:1")
	c := n.rootfs("c", weights.ID)
	c.ReadOnly = true
	n.mount(c)
	there := func() bool { return slices.Contains(n.entries("root"), "crius-artifacts") }
	n.cfg.ImageStore = filepath.Join(n.dir, "images")
	n.cfg.AdditionalArtifactStores = []string{n.cfg.Root}
	n.restart()
	ok(t, n.Adopt(testContext(t), nil))
	if !there() {
		t.Fatal("they went while they were an additional store")
	}
	n.cfg.AdditionalArtifactStores = nil
	n.restart()
	if len(n.list()) > 0 || !there() {
		t.Errorf("after the start: %+v are listed, there: %t", n.list(), there())
	}
	ok(t, n.Adopt(testContext(t), []Rootfs{c}))
	if !there() {
		t.Fatal("they went while a container mounts one")
	}
	n.removeRootfs(c)
	if there() {
		t.Error("they are there after the last container")
	}
	ok(t, os.MkdirAll(filepath.Join(n.cfg.Root, "crius-artifacts"), 0o700))
	n.restart()
	ok(t, n.Adopt(testContext(t), nil))
	if there() {
		t.Error("they are there after a start without containers")
	}
	ok(t, os.MkdirAll(filepath.Join(n.cfg.Root, "crius-artifacts"), 0o700))
	ok(t, n.Forget())
	if there() {
		t.Error("they are there after a wipe")
	}
}
