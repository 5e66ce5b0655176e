package storage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/archive"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// Layers have the ids and records that containers/image gives them, so that every
// program which shares the store finds and reuses them.
func TestLayersAreAsTheLibraryAddsThem(t *testing.T) {
	t.Parallel()
	base := layer(t, image.Dir("etc"), image.Text("etc/hostname", "base\n").Owned(7, 8))
	stored, err := image.NewStoredLayer(image.Text("etc/stored", "not compressed"))
	if err != nil {
		t.Fatal(err)
	}
	for name, layers := range map[string][]image.Layer{
		"gzip":           {base, layer(t, image.Whiteout("etc/hostname"), image.Text("etc/motd", "x").Owned(9, 10))},
		"not compressed": {base, stored},
		"twice":          {base, stored, base},
		"no files":       {image.RawLayer(make([]byte, 1024)), base},
		"no bytes":       {{Digest: digest.FromString(""), DiffID: digest.FromString("")}, base},
		"root directory": {base, layer(t, root(0o1711).Owned(7, 8), image.Text("a", "x")), layer(t, image.Text("b/c", "x")), layer(t, root(0o700)), base},
		"many owners":    {layer(t, ownedByMany(layers.KeptOwners-1)...), layer(t, image.Whiteout("l0").Owned(5, 6), image.Text("f", "x").Owned(3, 4))},
	} {
		a := build(t, image.Image{Layers: layers})
		ours, theirs := newNode(t), newNode(t)
		r := serve(t, "app", "1", a)
		ours.pull(r.Addr() + "/app:1")
		named, err := reference.ParseNormalizedNamed(r.Addr() + "/app:1")
		if err != nil {
			t.Fatal(err)
		}
		src, err := docker.NewReference(named)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := source.Copy(testContext(t), theirs.store, named, src, theirs.registries().Context(), copy.Options{}); err != nil {
			t.Fatal(err)
		}
		if got, want := ours.layerRecords(), theirs.layerRecords(); !slices.EqualFunc(got, want, sameLayer) {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}

// root is an entry for the root directory.
func root(mode int64) image.File {
	f := image.Dir(".")
	f.Mode = mode
	return f
}

// A layer is unpacked before the layers below it have arrived. What was unpacked goes with a pull
// that is cancelled, and what was downloaded is used by the next.
func TestLayersAreUnpackedSideBySide(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := noise(t, 400<<10, 1000, 2000)
	r := serve(t, "app", "1", a)
	r.Inject(registry.Fault{Path: "/blobs/" + layerDigest(a, 0), Do: registry.Stall(100 << 10)})
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(ctx, PullRequest{Image: r.Addr() + "/app:1"})
		ended <- err
	}()
	wait.For(t, "the upper layers to be unpacked", func() bool {
		found, _ := filepath.Glob(filepath.Join(n.cfg.Root, "overlay/tempdirs/crius-unpack-*/*/noise"))
		whole := 0
		for _, file := range found {
			if st, err := os.Stat(file); err == nil && (st.Size() == 1000 || st.Size() == 2000) {
				whole++
			}
		}
		return whole == 2
	})
	if len(n.layerRecords()) > 0 {
		t.Error("a layer was added without the one below it")
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	n.empty()
	r.Heal()
	img := n.pull(r.Addr() + "/app:1")
	if got := len(n.chain(img)); got != 3 {
		t.Errorf("%d layers", got)
	}
	n.noDebris()
}

// Files that a layer removes stay removed, however the layers were unpacked.
func TestRemovedFilesStayRemoved_containerd_13030_containerd_6991(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{
		layer(t, image.Text("gone", "x"), image.Text("d/below", "x"), image.Text("e/below", "x"), image.Text("again", "old")),
		layer(t, image.Whiteout("gone"), image.Dir("d"), image.Opaque("d"), image.Symlink("d/below", "../again"), image.Whiteout("e"), image.Whiteout("again")),
		layer(t, image.Text("again", "new"), image.Text("e/new", "x")),
	}}))
	c := n.rootfs("c", img.ID)
	n.mount(c)
	for _, name := range []string{"gone", "e/below"} {
		if _, err := os.Lstat(filepath.Join(c.Target, name)); !os.IsNotExist(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"again", "d/below"} {
		if got := n.read(c, name); got != "new" {
			t.Errorf("%s has %q", name, got)
		}
	}
	n.removeRootfs(c)
}

// An image of layers whose records lack the sizes of their blobs, as while another pull adds them,
// has the manifest of the registry.
func TestRecordsWithoutSizes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	base := layer(t, image.Text("f", "x"))
	r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{base}}))
	n.pull(r.Addr() + "/app:1")
	file := filepath.Join(n.cfg.Root, layersFile)
	text, err := os.ReadFile(file)
	ok(t, err)
	without := regexp.MustCompile(`"compressed-size":\d+,`).ReplaceAll(text, nil)
	if len(without) == len(text) {
		t.Fatalf("no sizes in %s", text)
	}
	ok(t, os.WriteFile(file, without, 0o600))
	other := build(t, image.Image{Layers: []image.Layer{base}, Config: imagespec.ImageConfig{Labels: map[string]string{"a": "b"}}})
	r.Push("app", "2", other)
	if img := n.pull(r.Addr() + "/app:2"); !slices.Contains(img.RepoDigests, r.Addr()+"/app@"+digest.FromBytes(other.Manifest).String()) {
		t.Errorf("digests %q", img.RepoDigests)
	}
}

// A path that a layer has twice is what it says last. Above another base the layer cannot be put
// together again, and is downloaded.
func TestPathTwice_podman_19407(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	twice := layer(t, image.Text("f", "first"), image.Text("./f", "last"), image.Text("x", "y"), image.Whiteout("gone"), image.Whiteout("gone"))
	r := serve(t, "app", "a", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("gone", "1")), twice}}))
	r.Push("app", "b", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("gone", "2")), twice}}))
	for _, tag := range []string{"a", "b"} {
		img := n.pull(r.Addr() + "/app:" + tag)
		c := n.rootfs(tag, img.ID)
		n.mount(c)
		if got := n.read(c, "f"); got != "last" {
			t.Errorf("%s: %q", tag, got)
		}
		if _, err := os.Lstat(filepath.Join(c.Target, "gone")); !os.IsNotExist(err) {
			t.Errorf("%s: %v", tag, err)
		}
		n.removeRootfs(c)
	}
}

// Containers run from images with more than 128 layers.
func TestManyLayers_crio_6261_buildkit_3067(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	var layers []image.Layer
	for i := range 130 {
		layers = append(layers, layer(t, image.Text("last", fmt.Sprint(i)), image.Text(fmt.Sprint("of-", i), "x")))
	}
	img := n.pull(serve(t, "app", "1", build(t, image.Image{Layers: layers})).Addr() + "/app:1")
	c := n.rootfs("c", img.ID)
	n.mount(c)
	for name, want := range map[string]string{"last": "129", "of-0": "x", "of-129": "x"} {
		if got := n.read(c, name); got != want {
			t.Errorf("%s has %q", name, got)
		}
	}
	n.removeRootfs(c)
}

// layerRecords returns all layer records, without the fields that differ between stores.
func (n *node) layerRecords() []cstorage.Layer {
	n.t.Helper()
	layers, err := n.store.Layers()
	if err != nil {
		n.t.Fatal(err)
	}
	slices.SortFunc(layers, func(a, b cstorage.Layer) int { return strings.Compare(a.ID, b.ID) })
	for i := range layers {
		layers[i].Created = time.Time{}
		layers[i].CompressionType = archive.Uncompressed // how a copy of the layer would be packed, if nobody said
	}
	return layers
}

func sameLayer(a, b cstorage.Layer) bool {
	return a.ID == b.ID && a.Parent == b.Parent &&
		a.CompressedDigest == b.CompressedDigest && a.CompressedSize == b.CompressedSize &&
		a.UncompressedDigest == b.UncompressedDigest && a.UncompressedSize == b.UncompressedSize &&
		slices.Equal(a.UIDs, b.UIDs) && slices.Equal(a.GIDs, b.GIDs) && slices.Equal(a.BigDataNames, b.BigDataNames)
}

// A small blob that unpacks to much cannot be unpacked time and again, also where its
// content came with another image; a few small repeats do not matter.
func TestRepeatedLayersAreBounded(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.puller.RepeatRoom = 1 << 20
	big, small := layer(t, image.Text("zeros", strings.Repeat("0", 1<<20))), layer(t, image.Text("small", "x"))
	r := serve(t, "app", "once", build(t, image.Image{Layers: []image.Layer{small, big, small, small, small}}))
	r.Push("app", "twice", build(t, image.Image{Layers: []image.Layer{big, small, big, small}}))
	r.Push("app", "often", build(t, image.Image{Layers: []image.Layer{big, big, big, big, small}}))
	for range 2 { // the second time with the others in the store
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:often"})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), big.Digest.String()) || !strings.Contains(err.Error(), "rebuild the image") {
			t.Errorf("repeated layers: %v", err)
		}
		for _, tag := range []string{"once", "twice"} {
			n.pull(r.Addr() + "/app:" + tag)
		}
	}
	for _, img := range n.list() {
		n.remove(img.ID)
	}
	n.empty()
}

// A blob that is in the store, or is in the image twice, is downloaded once.
func TestBlobIsDownloadedOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	base, common := layer(t, image.Text("base", "x")), layer(t, image.Text("common", "y"))
	r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{base, common, layer(t, image.Whiteout("common")), common}}))
	r.Push("app", "2", build(t, image.Image{Layers: []image.Layer{common, layer(t, image.Text("top", "z"))}}))
	first := n.pull(r.Addr() + "/app:1")
	second := n.pull(r.Addr() + "/app:2")
	downloads := 0
	for _, request := range r.Requests() {
		if strings.HasSuffix(request.Path, common.Digest.String()) {
			downloads++
		}
	}
	if downloads != 1 {
		t.Errorf("%d downloads", downloads)
	}
	for i, img := range []*Image{first, second} {
		c := n.rootfs([]string{"first", "second"}[i], img.ID)
		n.mount(c)
		if got := n.read(c, "common"); got != "y" {
			t.Errorf("image %d has %q", i+1, got)
		}
		n.removeRootfs(c)
		n.remove(img.ID)
	}
	n.empty()
}

// A layer that is there under its id, but was made from another blob, is an image's once the
// registry has sent that blob.
func TestLayerOfAnotherBlob(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	file := image.Text("common", "y")
	packed := layer(t, file)
	stored, err := image.NewStoredLayer(file)
	if err != nil {
		t.Fatal(err)
	}
	r := serve(t, "app", "packed", build(t, image.Image{Layers: []image.Layer{packed}}))
	r.Push("app", "alone", build(t, image.Image{Layers: []image.Layer{stored}, Config: imagespec.ImageConfig{Labels: map[string]string{"a": "b"}}}))
	r.Push("app", "more", build(t, image.Image{Layers: []image.Layer{stored, layer(t, image.Text("top", "z"))}}))
	n.pull(r.Addr() + "/app:packed")
	for _, tag := range []string{"alone", "more"} {
		asked := len(r.Requests())
		img := n.pull(r.Addr() + "/app:" + tag)
		if !slices.ContainsFunc(r.Requests()[asked:], func(q registry.Request) bool { return strings.HasSuffix(q.Path, stored.Digest.String()) }) {
			t.Errorf("%s: the registry was not asked for the blob", tag)
		}
		c := n.rootfs(tag, img.ID)
		n.mount(c)
		if got := n.read(c, "common"); got != "y" {
			t.Errorf("%s: %q", tag, got)
		}
		n.removeRootfs(c)
	}
	for _, img := range n.list() {
		n.remove(img.ID)
	}
	n.empty()
}
