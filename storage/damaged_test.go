package storage

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/test/kit/registry"
)

// setParent changes the record of a layer, as a person with an editor does.
func (n *node) setParent(id, parent string) {
	n.t.Helper()
	n.editLayers(func(layers []map[string]any) []map[string]any {
		for _, layer := range layers {
			if layer["id"] == id {
				layer["parent"] = parent
			}
		}
		return layers
	})
	n.othersWrite()
}

// Damaged records can have a layer below itself. A server that runs says so wherever it meets them, and ends
// each walk. Its next start restores the records of the last manifest, even if it has pulled since.
func TestLayersBelowThemselves(t *testing.T) {
	t.Parallel()
	for name, parent := range map[string]int{"top": 0, "itself": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, synced)
			r := serve(t, "app", "1", motd(t, "precious"))
			r.Push("app", "2", noise(t, 100))
			img := n.pull(r.Addr() + "/app:1")
			own := n.rootfs("own", img.ID)
			n.mount(own)
			chain := n.chain(img)
			n.setParent(chain[1], chain[parent])
			n.images.forget(img.ID) // as a change of the image's own record does

			const says = " is its own ancestor; restart crius"
			if images := n.list(); len(images) != 0 {
				t.Errorf("listed: %+v", images)
			}
			_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
			if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), says) {
				t.Errorf("pull: %v", err)
			}
			got := n.verify(true, own)
			for _, want := range []string{own.ID + " " + img.ID + " its image is damaged: ", " image " + img.ID + " damaged records"} {
				if !strings.Contains(got, want) || strings.Count(got, says) != 2 {
					t.Errorf("found %q, want %q", got, want)
				}
			}
			other := n.pull(r.Addr() + "/app:2")
			if err := n.manifest.Write(testContext(t)); err == nil || !strings.Contains(err.Error(), layersFile+" is damaged: layer") {
				t.Errorf("manifest: %v", err)
			}

			n.restart()
			ok(t, n.Adopt(testContext(t), []Rootfs{own}))
			if images := n.list(); len(images) != 1 || images[0].ID != img.ID {
				t.Errorf("listed after the start: %+v", images)
			}
			if aside, err := durable.RootsOf(n.store).DamagedRecords(); err != nil || len(aside) != 1 || filepath.Base(aside[0]) != "layers.json.damaged" {
				t.Errorf("moved aside: %q, %v", aside, err)
			}
			n.pull(r.Addr() + "/app:2")
			c, d := n.rootfs("c", img.ID), n.rootfs("d", other.ID)
			n.mount(c)
			n.mount(d)
			if n.read(c, "etc/motd") != "precious" {
				t.Error("wrong content")
			}
			for _, r := range []Rootfs{own, c, d} {
				n.removeRootfs(r)
			}
			n.remove(img.ID)
			n.remove(other.ID)
		})
	}
}

// An image whose layers are their own ancestors can be removed. The layers stay until the next start.
func TestRemovalOfLayersBelowThemselves(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	ref := serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1"
	img := n.pull(ref)
	chain := n.chain(img)
	n.setParent(chain[1], chain[0])
	n.remove(img.ID)
	n.leftovers.OrphanAge = 0
	n.verify(false)
	if _, err := n.Pull(testContext(t), PullRequest{Image: ref}); !errors.Is(err, fault.Precondition) {
		t.Errorf("pull: %v", err)
	}
	n.restart()
	n.pull(ref)
	n.remove(img.ID)
}

// A pull makes an image whole whose files have vanished while the server runs, before a container fails, and so
// does the pull of an image that has the same layer.
func TestPullNoticesLostFiles_containerd_3369_podman_7145_podman_24106(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "one"))
	r.Push("app", "2", motd(t, "two"))
	for i, tag := range []string{"1", "1", "2"} {
		img := n.pull(r.Addr() + "/app:1")
		for what, path := range map[string]func(layer string) string{
			"files":     n.diff,
			"directory": func(layer string) string { return filepath.Dir(n.diff(layer)) },
			"all":       func(string) string { return filepath.Join(n.cfg.Root, "overlay/*") },
		} {
			n.list()
			found, _ := filepath.Glob(path(n.chain(img)[min(i, 1)]))
			for _, lost := range found {
				remove(t, lost)
			}
			c := n.rootfs("c", n.pull(r.Addr()+"/app:"+tag).ID)
			n.mount(c)
			if got := n.read(c, "etc/hostname") + n.read(c, "etc/motd"); got != map[string]string{"1": "base\none", "2": "base\ntwo"}[tag] {
				t.Errorf("%s, layer %d: %q", what, i, got)
			}
			n.removeRootfs(c)
			n.remove(c.ImageID)
			n.pull(r.Addr() + "/app:1")
		}
	}
	for _, img := range n.list() {
		n.remove(img.ID)
	}
	n.empty()
}

// Files that a container of crius or of another program uses are not unpacked below it: the pull says what to do.
func TestPullOfLostFilesInUse(t *testing.T) {
	t.Parallel()
	for name, use := range map[string]func(n *node, img *Image) (end func()){
		"crius": func(n *node, img *Image) func() {
			c := n.rootfs("c", img.ID)
			n.mount(c)
			return func() { n.removeRootfs(c) }
		},
		"podman": func(n *node, img *Image) func() {
			n.container(podmanID, img.ID, `{"name":"toolbox"}`, "toolbox")
			return func() { ok(n.t, n.store.DeleteContainer(podmanID)) }
		},
	} {
		n := newNode(t)
		n.holds.grace = 0
		r := serve(t, "app", "1", motd(t, "one"))
		r.Push("app", "2", motd(t, "two"))
		img := n.pull(r.Addr() + "/app:1")
		base := n.chain(img)[1]
		end := use(n, img)
		remove(t, n.diff(base))
		for _, tag := range []string{"1", "2"} {
			_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:" + tag})
			if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "the files of layer "+base+" are gone, and something still uses it: remove") {
				t.Errorf("%s, image %s: %v", name, tag, err)
			}
		}
		if found := n.verify(false); !strings.Contains(found, "image "+img.ID+" layers are missing") {
			t.Errorf("%s: found %q", name, found)
		}
		end()
		for _, tag := range []string{"1", "2"} {
			c := n.rootfs(tag, n.pull(r.Addr()+"/app:"+tag).ID)
			n.mount(c)
			n.removeRootfs(c)
			n.remove(c.ImageID)
		}
		n.empty()
	}
}

// An image whose manifest was never written, as its program was killed, is in no list: a check names it once
// nobody may be about to write the manifest, and a repair removes it, unless it was made here under a name.
func TestVerifyNamesImagesWithoutManifest_podman_12854_podman_4264(t *testing.T) {
	t.Parallel()
	const says = " its manifest or config is damaged: the program that made the image ended before it had written the manifest"
	for _, place := range [][]func(*Options){nil, {apart}} {
		for name, c := range map[string]struct {
			names []string
			local bool
		}{
			"registry": {names: []string{"example.com/app:1"}},
			"unnamed":  {},
			"local":    {names: []string{"localhost/built:1"}, local: true},
		} {
			for _, config := range []bool{false, true} {
				n := newNode(t, place...)
				sound := n.pull(serve(t, "app", "1", motd(t, "sound")).Addr() + "/app:1")
				half := &cstorage.ImageOptions{CreationDate: time.Unix(1e9, 0)} // when the image was built
				if config {
					half.BigData = []cstorage.ImageBigDataOption{{Key: "sha256:" + digestOf(name), Data: []byte("{}")}}
				}
				_, err := n.store.CreateImage(digestOf(name), c.names, sound.topLayer, "", half)
				ok(t, err)
				if got := n.verify(true); got != "" {
					t.Errorf("%s, which may be in the making: %q", name, got)
				}
				records := filepath.Join(n.roots.ForImages(), "overlay-images")
				for _, path := range []string{digestOf(name), "images.json"} {
					if err := os.Chtimes(filepath.Join(records, path), time.Time{}, time.Now().Add(-2*time.Hour)); err != nil && config {
						t.Error(err)
					}
				}
				if images := n.list(); len(images) != 1 || images[0].ID != sound.ID {
					t.Errorf("listed: %+v", images)
				}
				want := " image " + digestOf(name) + says
				if got := n.verify(true); !strings.HasPrefix(got, want) || strings.Contains(got, "built on this node") != c.local {
					t.Errorf("%s, config %t: %q, want %q", name, config, got, want)
				}
				if _, err := n.store.Image(digestOf(name)); (err == nil) != c.local {
					t.Errorf("%s, config %t, after the repair: %v", name, config, err)
				}
				n.remove(digestOf(name))
				n.remove(sound.ID)
				n.empty()
			}
		}
	}
}

// The pull of an image that has a record and no manifest makes it whole.
func TestPullOfImageWithoutManifest(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "whole")
	ref := serve(t, "app", "1", a).Addr() + "/app:1"
	img := n.pull(ref)
	_, err := n.store.CreateImage(digestOf("keeps the layers"), nil, img.topLayer, "", nil)
	ok(t, err)
	n.remove(ref)
	_, err = n.store.CreateImage(img.ID, []string{ref}, img.topLayer, "", nil)
	ok(t, err)
	n.remove(digestOf("keeps the layers"))
	n.list()
	c := n.rootfs("c", n.pull(ref).ID)
	n.mount(c)
	if n.read(c, "etc/motd") != "whole" {
		t.Error("wrong content")
	}
	n.removeRootfs(c)
	n.remove(ref)
	n.empty()
}

// A pull whose layers another program removes again and again begins again a few times, and then says what to do.
func TestPullWhoseLayersOthersRemove(t *testing.T) {
	t.Parallel()
	for _, removals := range []int32{2, 3} {
		n := newNode(t)
		a := motd(t, "x")
		r := serve(t, "app", "1", a)
		var removed atomic.Int32
		r.Inject(registry.Fault{Path: layerDigest(a, 1), Do: func(answer http.Handler, _ <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if removed.Add(1) <= removals {
					n.waitLayers(1)
					if err := n.store.DeleteLayer(n.layerIDs()[0]); err != nil {
						t.Error(err)
					}
				}
				answer.ServeHTTP(w, req)
			})
		}})
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		if failed := removals == 3; !failed && err != nil {
			t.Errorf("%d removals: %v", removals, err)
		} else if failed && (!errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "were removed during each of 3 attempts (")) {
			t.Errorf("%d removals: %v", removals, err)
		}
	}
}

// Whatever records a person deletes below a server that runs, as advice for other runtimes goes, the next pull
// brings the image back, and what a container has mounted can be removed.
func TestRecordsAreDeletedWhileRunning_crio_4285_crio_3768(t *testing.T) {
	t.Parallel()
	for _, gone := range []string{"overlay-images", "overlay-layers", "overlay-containers", "*"} {
		t.Run(gone, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			ref := serve(t, "app", "1", motd(t, "again")).Addr() + "/app:1"
			img := n.pull(ref)
			own := n.rootfs("own", img.ID)
			n.mount(own)
			n.list()
			found, _ := filepath.Glob(filepath.Join(n.cfg.Root, gone))
			for _, path := range found {
				if err := os.RemoveAll(path); err != nil && filepath.Base(path) != "overlay" { // which is a mount
					t.Error(err)
				}
			}
			n.pull(ref)
			c := n.rootfs("c", img.ID)
			n.mount(c)
			if n.read(c, "etc/motd") != "again" {
				t.Error("wrong content")
			}
			n.removeRootfs(c)
			n.removeRootfs(own)
			n.remove(ref)
			if layers := n.layerIDs(); len(layers) > 0 {
				t.Errorf("left over: %q", layers)
			}
		})
	}
}

// A file that was changed in a layer is right again after the image was removed and pulled again.
func TestRemovalAndPullReplaceFiles_containerd_934(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ref := serve(t, "app", "1", motd(t, "right")).Addr() + "/app:1"
	img := n.pull(ref)
	truncate(t, filepath.Join(n.diff(n.chain(img)[0]), "etc/motd"))
	n.remove(ref)
	c := n.rootfs("c", n.pull(ref).ID)
	n.mount(c)
	if got := n.read(c, "etc/motd"); got != "right" {
		t.Errorf("%q", got)
	}
	n.removeRootfs(c)
}

// If the records give two images one name, one of them has it: the others stay usable, and a pull settles the rest.
func TestTwoImagesOfOneName_podman_hpc_119(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "one"))
	r.Push("app", "2", motd(t, "two"))
	one, two := n.pull(r.Addr()+"/app:1"), n.pull(r.Addr()+"/app:2")
	ok(t, n.Close(testContext(t)))
	path := filepath.Join(n.cfg.Root, "overlay-images/images.json")
	ok(t, os.WriteFile(path, []byte(strings.ReplaceAll(n.text(path), "/app:2", "/app:1")), 0o600))
	ok(t, os.WriteFile(filepath.Join(filepath.Dir(path), "images.lock"), random(64), 0o600))
	n.open()
	if images := n.list(); len(images) != 2 || len(images[0].RepoTags)+len(images[1].RepoTags) != 1 {
		t.Errorf("images: %+v", images)
	}
	for tag, want := range map[string]string{"1": one.ID, "2": two.ID} {
		if img := n.pull(r.Addr() + "/app:" + tag); img.ID != want {
			t.Errorf("pulled %s, want %s", img.ID, want)
		}
	}
	for _, img := range n.list() {
		if len(img.RepoTags) != 1 {
			t.Errorf("image %s has the tags %q", img.ID, img.RepoTags)
		}
		n.remove(img.ID)
	}
	n.empty()
}

// What podman system check looks at, it finds right in a store that crius has filled and uses.
func TestLibraryFindsNoDamage_podman_25101(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	c := n.rootfs("c", img.ID)
	n.mount(c)
	n.removeRootfs(c)
	found, err := n.store.Check(cstorage.CheckEverything())
	ok(t, err)
	if len(found.Layers)+len(found.Images)+len(found.Containers) > 0 {
		t.Errorf("layers: %v, images: %v, containers: %v", found.Layers, found.Images, found.Containers)
	}
}
