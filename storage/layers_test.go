package storage

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/archive"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
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
