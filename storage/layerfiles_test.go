package storage

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/test/kit/image"
)

// ownedByMany are further names of a file, each with an owner of its own.
func ownedByMany(count int) []image.File {
	files := []image.File{image.Text("f", "x")}
	for i := range count {
		files = append(files, image.Hardlink(fmt.Sprint("l", i), "f").Owned(100_000+i, 200_000+i))
	}
	return files
}

// longest is the longest list of owners in a file of JSON.
func longest(t *testing.T, file string) (most int) {
	t.Helper()
	text, err := os.ReadFile(file)
	ok(t, err)
	var document any
	ok(t, json.Unmarshal(text, &document))
	var look func(any)
	look = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, v := range v {
				look(v)
			}
		case map[string]any:
			for key, v := range v {
				if list, is := v.([]any); is && (key == "uidset" || key == "gidset") {
					most = max(most, len(list))
				}
				look(v)
			}
		}
	}
	look(document)
	return most
}

// What an image says of the owners of its files stays in its files: in a record it would stay
// in the memory of the server, and be as long as the image likes.
func TestOwnersOfFilesAreNotRecorded_storage_389(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	many := layer(t, ownedByMany(500)...)
	r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("a", "1")), many}}))
	img := n.pull(r.Addr() + "/app:1")
	r.Push("app", "2", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("a", "2")), many}})) // again, from the store
	other := n.pull(r.Addr() + "/app:2")
	for _, file := range []string{layersFile, manifestFile} {
		if most := longest(t, filepath.Join(n.cfg.Root, file)); most > layers.KeptOwners {
			t.Errorf("%s has a list of %d owners", file, most)
		}
	}
	for _, l := range n.layerRecords() {
		if len(l.UIDs) > layers.KeptOwners || len(l.GIDs) > layers.KeptOwners {
			t.Errorf("the library knows %d uids and %d gids of a layer", len(l.UIDs), len(l.GIDs))
		}
	}
	for _, img := range []*Image{img, other} {
		c := n.rootfs(img.ID[:10], img.ID)
		n.mount(c)
		checkOwner(t, filepath.Join(c.Target, "l499"), 100_499, 200_499)
		n.removeRootfs(c)
		n.remove(img.ID)
	}
	n.empty()
}

// Records of earlier versions of crius, and of other tools, lose the owners before they are in
// memory, in all places that keep layers.
func TestOwnersOfFilesLeaveRecords(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Options){
		"root":       func(*Options) {},
		"imagestore": func(o *Options) { o.ImageStore = o.Root + "-images" },
	} {
		n := newNode(t, synced, change)
		img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
		ok(t, n.Close(t.Context()))
		files := []string{filepath.Join(n.cfg.Root, manifestFile), filepath.Join(n.cfg.Root, layersFile)}
		if n.cfg.ImageStore != "" {
			files[1] = filepath.Join(n.cfg.ImageStore, layersFile)
		}
		ids := strings.TrimSuffix(strings.Repeat("1,", 10_000), ",")
		for _, file := range files {
			text, err := os.ReadFile(file)
			ok(t, err)
			filled := bytes.ReplaceAll(text, []byte(`"uidset":[0],"gidset":[0]`), []byte(`"uidset":[`+ids+`],"gidset":[`+ids+`]`))
			ok(t, os.WriteFile(file, filled, 0o600))
			if longest(t, file) != 10_000 {
				t.Fatalf("%s: not filled: %.300s", name, text)
			}
		}
		n.open()
		for _, file := range files {
			if most := longest(t, file); most != 0 {
				t.Errorf("%s: %s has a list of %d owners", name, file, most)
			}
		}
		c := n.rootfs("c", img.ID)
		n.mount(c)
		n.removeRootfs(c)
		n.remove(img.ID)
		n.empty()
	}
}

// A layer that no image needs is refused before it has taken the node's time or files, and the
// pull says which one it is. TestBoundFiles of package layers has all the bounds.
func TestExcessiveLayersAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	bad := layer(t, image.Text(strings.Repeat("d/", 1900)+"f", "x"))
	r := serve(t, "app", "bad", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("good", "x")), bad}}))
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"})
	if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "directories") || !strings.Contains(err.Error(), bad.Digest.String()) {
		t.Errorf("pulled: %v", err)
	}
	n.empty()
}

// with gives an entry extended attributes.
func with(f image.File, pairs ...string) image.File {
	f.PAXRecords = map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		f.PAXRecords["SCHILY.xattr."+pairs[i]] = pairs[i+1]
	}
	return f
}

// overlayfs obeys trusted.overlay.*, so an image must not have it, or it could choose what a
// directory shows. As in containerd all of trusted.* is dropped, and user.* where the kernel does
// not accept it. What is stored of the layer stays the same.
func TestTrustedAttributesAreDropped(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	long := strings.Repeat("x", 70_000) // the headers are longer than any buffer
	odd := layer(t,
		with(image.Dir("d"), "trusted.overlay.redirect", "/secret", "trusted.overlay.opaque", "y", "user.kept", "1"),
		with(image.Text("meta", "x"), "trusted.overlay.metacopy", "", "trusted.a", long[:60_000], "user.kept", "2", "trusted.overlay.whiteout", "y"),
		with(image.Symlink("link", "meta"), "user.a", "b", "trusted.overlay.a", "b"),
		with(image.File{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "pipe", Mode: 0o600}}, "user.a", "b"),
		image.Text("d/"+long[:200], "x"), image.Opaque("d"),
	)
	base := layer(t, image.Dir("secret"), image.Text("secret/key", "s3cr3t"), image.Dir("d"), image.Text("d/hidden", "x"))
	r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{base, odd}}))
	r.Push("app", "2", build(t, image.Image{Layers: []image.Layer{odd}})) // put together from what the store has
	for i, tag := range []string{"1", "2"} {
		img := n.pull(r.Addr() + "/app:" + tag)
		top := n.diff(n.chain(img)[0])
		for name, want := range map[string]string{"d": "user.kept", "meta": "user.kept", "link": "", "pipe": ""} {
			for _, xattr := range attributesOf(t, filepath.Join(top, name)) {
				if xattr != want && !strings.HasPrefix(xattr, "security.") && (name != "d" || xattr != "trusted.overlay.opaque") {
					t.Errorf("%s: %s has %s", tag, name, xattr)
				}
				if xattr == want {
					want = ""
				}
			}
			if want != "" {
				t.Errorf("%s: %s lacks %s", tag, name, want)
			}
		}
		c := n.rootfs(tag, img.ID)
		n.mount(c)
		if _, err := os.Lstat(filepath.Join(c.Target, "d/key")); !os.IsNotExist(err) {
			t.Errorf("the directory shows another: %v", err)
		}
		if _, err := os.Lstat(filepath.Join(c.Target, "d/hidden")); i == 0 && !os.IsNotExist(err) {
			t.Errorf("the directory is not opaque: %v", err)
		}
		n.removeRootfs(c)
	}
}

// Attributes that the kernel or the node's policy refuses do not keep an image from being pulled.
func TestAttributesThatTheKernelRefuses_containerd_7093_moby_53616(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{layer(t,
		with(image.Symlink("link", "file"), "user.shatag.ts", "1"),
		with(image.Device("null", 1, 3), "user.containers.override_stat", "0:0:0600"),
		with(image.File{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "control"}}, "user.a", "b"),
		with(image.Text("file", "x"), "security.selinux", "system_u:object_r:bin_t:s0\x00", "user.a", "b"),
		with(image.Dir("etc"), "user.overlay.origin", "", "user.overlay.impure", "y"),
	)}}))
	top := n.diff(n.chain(img)[0])
	for name, want := range map[string]int{"link": 0, "null": 0, "control": 0, "file": 1} {
		got := slices.DeleteFunc(attributesOf(t, filepath.Join(top, name)), func(xattr string) bool { return !strings.HasPrefix(xattr, "user.") })
		if len(got) != want {
			t.Errorf("%s has %q", name, got)
		}
	}
	c := n.rootfs("c", img.ID)
	n.mount(c)
	n.removeRootfs(c)
}

func attributesOf(t *testing.T, path string) []string {
	t.Helper()
	buffer := make([]byte, 4096)
	size, err := unix.Llistxattr(path, buffer)
	ok(t, err)
	return strings.FieldsFunc(string(buffer[:size]), func(r rune) bool { return r == 0 })
}
