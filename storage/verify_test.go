package storage

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/durable"
)

// verify returns the defects of live root file systems and of the store, a line each; with mend it
// repairs them.
func (n *node) verify(mend bool, live ...Rootfs) string {
	n.t.Helper()
	defects, err := n.Verify(testContext(n.t), live)
	if err != nil {
		n.t.Fatal(err)
	}
	var lines []string
	for _, d := range defects {
		lines = append(lines, d.Rootfs+" "+d.Object+" "+d.Text)
		if mend && d.Mend != nil {
			if err := d.Mend(testContext(n.t)); err != nil {
				n.t.Errorf("%s: %v", d.Text, err)
			}
		}
	}
	return strings.Join(lines, "\n")
}

// An image that was made on this machine is in no registry: its damage is reported, and left to a
// person, even by a repair.
func TestVerifyKeepsLocalImages(t *testing.T) {
	t.Parallel()
	for i, names := range [][]string{{"localhost/built:latest"}, nil} {
		n, img := pulled(t, motd(t, "x"))
		top := n.chain(img)[0]
		local, err := n.store.CreateImage(digestOf(fmt.Sprint("built", i)), names, top, "", nil)
		ok(t, err)
		remove(t, filepath.Dir(n.diff(top)))
		for range 2 {
			if got := n.verify(true); !strings.Contains(got, "image "+local.ID) || !strings.Contains(got, "built on this node") {
				t.Errorf("image with the names %q: %q", names, got)
			}
			if _, err := n.store.Image(local.ID); err != nil {
				t.Errorf("image with the names %q: %v", names, err)
			}
		}
		if got := n.verify(false); strings.Contains(got, "image "+img.ID) {
			t.Errorf("the pulled image is still there: %q", got)
		}
	}
}

// An image that has lost layers may be pulled again, and used, before it is removed for that.
func TestMendKeepsImageThatWasPulledAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ref := serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1"
	img := n.pull(ref)
	remove(t, filepath.Dir(n.diff(n.chain(img)[0])))
	defects, err := n.Verify(testContext(t), nil)
	ok(t, err)
	if len(defects) != 1 || defects[0].Mend == nil {
		t.Fatalf("found %+v", defects)
	}
	n.images.forget(img.ID) // as if the server had been started since, which then knows
	n.pull(ref)
	ok(t, defects[0].Mend(testContext(t)))
	if listed := n.list(); len(listed) != 1 || len(listed[0].RepoTags) != 1 {
		t.Errorf("images that are left: %+v", listed)
	}
}

// An image whose manifest or config is damaged is not listed, so no kubelet removes it: it is
// reported, and a repair removes it.
func TestVerifyNamesDamagedDocuments_podman_11363_podman_22655(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]func(*Image) string{
		"manifest": func(*Image) string { return cstorage.ImageDigestBigDataKey },
		"config":   func(i *Image) string { return "=" + base64.StdEncoding.EncodeToString([]byte("sha256:"+i.ID)) },
	} {
		for what, damage := range map[string]func(testing.TB, string){"missing": remove, "empty": truncate, "zeros": zero} {
			n, sound := pulled(t, motd(t, "sound"))
			r := serve(t, "app", "1", motd(t, "damaged"))
			img := n.pull(r.Addr() + "/app:1")
			damage(t, filepath.Join(n.cfg.Root, "overlay-images", img.ID, key(img)))
			n.restart()
			for _, mend := range []bool{false, true} {
				if got := n.verify(mend); !strings.HasPrefix(got, " image "+img.ID+" its manifest or config is damaged: ") || strings.Contains(got, sound.ID) {
					t.Errorf("%s %s: %q", name, what, got)
				}
			}
			if got := n.verify(false); got != "" {
				t.Errorf("%s %s, after the repair: %q", name, what, got)
			}
			n.remove(sound.ID)
			n.empty()
		}
	}
}

func TestVerify(t *testing.T) {
	n, image := pulled(t, motd(t, "hello"))
	r, v := n.rootfs("c1", image.ID), n.rootfs("volume", image.ID)
	v.ReadOnly = true
	n.mount(r)
	n.mount(v)
	if got := n.verify(true, r, v); got != "" {
		t.Errorf("nothing is wrong, but %q", got)
	}

	upper := filepath.Join(r.Dir, upperName)
	if err := os.Rename(upper, upper+".away"); err != nil {
		t.Fatal(err)
	}
	if got := n.verify(true, r, v); !strings.Contains(got, r.ID+" "+image.ID+" its writable layer "+upper+" is gone") {
		t.Errorf("writable layer: %q", got)
	}
	if err := os.Rename(upper+".away", upper); err != nil {
		t.Fatal(err)
	}

	if err := n.UnmountRootfs(v); err != nil {
		t.Fatal(err)
	}
	if got := n.verify(true, r, v); !strings.Contains(got, v.ID+" "+image.ID+" nothing is mounted at "+v.Target) {
		t.Errorf("unmounted: %q", got)
	}
	n.mount(v)

	stray, err := n.store.CreateLayer("", "", nil, "", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := n.verify(false); got != "" {
		t.Errorf("a new layer may be becoming an image: %q", got)
	}
	n.leftovers.OrphanAge = time.Nanosecond
	for _, mend := range []bool{false, true} {
		if got := n.verify(mend, r, v); !strings.Contains(got, "layer "+stray.ID) {
			t.Errorf("a layer without an image: %q", got)
		}
	}
	if got := n.verify(false, r, v); got != "" {
		t.Errorf("still %q", got)
	}

	top, err := n.store.Image(image.ID)
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := durable.LayerDirs(n.store, top.TopLayer)
	if err != nil {
		t.Fatal(err)
	}
	n.removeRootfs(r)
	n.removeRootfs(v)
	if err := os.RemoveAll(filepath.Dir(dirs[0])); err != nil {
		t.Fatal(err)
	}
	got := n.verify(true, r)
	for _, want := range []string{"its image is damaged", "image " + image.ID + " layers are missing"} {
		if !strings.Contains(got, want) {
			t.Errorf("lost layer: %q, want %q", got, want)
		}
	}
	if got := n.verify(false); got != "" {
		t.Errorf("after all: %q", got)
	}
	n.empty()
}

// The record that protects an image from other tools is made again if one of them has deleted it:
// at the next use, by a repair and by a start.
func TestLostImageReferenceIsRecreated(t *testing.T) {
	t.Parallel()
	for name, heal := range map[string]func(n *node, r Rootfs){
		"use": func(n *node, r Rootfs) {
			other := n.rootfs("other", r.ImageID)
			n.mount(other)
			n.removeRootfs(other)
		},
		"repair": func(n *node, r Rootfs) {
			defects, err := n.Verify(testContext(n.t), []Rootfs{r})
			if err != nil || len(defects) != 1 || defects[0].Mend == nil || !strings.Contains(defects[0].Object, r.ImageID) {
				n.t.Fatalf("%+v, %v", defects, err)
			}
			ok(n.t, defects[0].Mend(testContext(n.t)))
			if defects, err := n.Verify(testContext(n.t), []Rootfs{r}); err != nil || len(defects) != 0 {
				n.t.Errorf("afterwards: %+v, %v", defects, err)
			}
		},
		"start": func(n *node, r Rootfs) {
			n.restart()
			ok(n.t, n.Adopt(testContext(n.t), []Rootfs{r}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, img := pulled(t, motd(t, "x"))
			r := n.rootfs("a", img.ID)
			n.mount(r)
			ok(t, n.store.DeleteContainer(holdID(img.ID)))
			heal(n, r)
			if _, err := n.store.DeleteImage(img.ID, true); !errors.Is(err, cstorage.ErrImageUsedByContainer) {
				t.Errorf("another tool removes the image: %v", err)
			}
			n.removeRootfs(r)
		})
	}
}

// Without a server, too, an image in use that nothing keeps is found.
func TestLostImageReferenceIsFoundReadOnly(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	r := n.rootfs("a", img.ID)
	n.mount(r)
	mine := n.cfg
	n.cfg.ReadOnly = true
	for _, lost := range []bool{false, true} {
		if lost {
			ok(t, n.store.DeleteContainer(holdID(img.ID)))
		}
		ok(t, n.Close(t.Context()))
		n.open()
		defects, err := n.Verify(testContext(t), []Rootfs{r})
		if found := len(defects) == 1 && strings.Contains(defects[0].Text, holdPrefix+img.ID); err != nil || found != lost || !lost && len(defects) > 0 {
			t.Errorf("lost %t: %+v, %v", lost, defects, err)
		}
	}
	ok(t, n.Close(t.Context()))
	n.cfg = mine
	n.open()
	n.removeRootfs(r)
}
