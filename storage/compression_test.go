package storage

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"go.podman.io/storage/pkg/archive"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/program"
)

// zstdOf compresses as real builders do.
// contentOf returns the archive of a layer.
func contentOf(t testing.TB, zipped image.Layer) []byte {
	t.Helper()
	archived, err := archive.DecompressStream(bytes.NewReader(zipped.Blob))
	ok(t, err)
	content, err := io.ReadAll(archived)
	ok(t, err)
	return content
}

func zstdOf(t testing.TB, content []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := archive.CompressStream(&out, archive.Zstd)
	if err == nil {
		_, err = w.Write(content)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// frame is a zstd frame of one empty block that asks for a window of
// 2^(10+exponent) bytes and mantissa eighths more.
func frame(exponent, mantissa byte) []byte {
	return []byte{0x28, 0xb5, 0x2f, 0xfd, 0, exponent<<3 | mantissa, 1, 0, 0}
}

func skippable(content string) []byte {
	return append(binary.LittleEndian.AppendUint32([]byte{0x5a, 0x2a, 0x4d, 0x18}, uint32(len(content))), content...)
}

// xzHeader is the beginning of a stream whose dictionary has 4 GiB: its reader
// would allocate them at once.
var xzHeader = []byte("\xfd7zXZ\x00\x00\x04\xe6\xd6\xb4\x46\x02\x00\x21\x01\x28\x00\x00\x00")

// The magic bytes decide how a layer is decompressed, not its media type. A layer that could choose
// how much memory that takes is refused while it comes, and the error says which layer and why.
func TestGreedyLayersAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	real := zstdOf(t, nil)
	r := serve(t, "app", "1", motd(t, "x"))
	for what, content := range map[string][]byte{
		"xz": xzHeader, "bzip2": []byte("BZh91AY&SY"), "window": frame(19, 0), "zstd": append(real[:len(real):len(real)], frame(19, 0)...),
	} {
		greedy := image.Layer{Blob: content, Digest: digest.FromBytes(content), DiffID: someDigest}
		r.Push("app", "bad", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("a", "b")), greedy}}))
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), what) || strings.Count(err.Error(), greedy.Digest.String()) != 1 {
			t.Errorf("%s: %v", what, err)
		}
	}
	n.empty()
}

// A layer that is compressed twice is refused as such.
func TestLayersCompressedTwice(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	zipped := layer(t, image.Text("file", "content"))
	content := contentOf(t, zipped)
	gzipOf := func(content []byte) []byte { return image.RawLayer(content).Blob }
	for what, blobs := range map[string][2][]byte{
		"gzip":  {zipped.Blob, gzipOf(zipped.Blob)},
		"zstd":  {zstdOf(t, content), gzipOf(zstdOf(t, content))},
		"gzip ": {zipped.Blob, zstdOf(t, zipped.Blob)},
		"xz":    {xzHeader, gzipOf(xzHeader)},
	} {
		for _, says := range []digest.Digest{digest.FromBytes(blobs[0]), zipped.DiffID} {
			twice := image.Layer{Blob: blobs[1], Digest: digest.FromBytes(blobs[1]), DiffID: says}
			r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{twice}}))
			want := "it is compressed twice: what it decompresses to is " + strings.TrimSpace(what) + "; rebuild the image"
			if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s, diff_id %s: %v", what, says, err)
			}
		}
	}
	n.empty()
}

// Layers are decompressed without the programs of the node: pigz with some versions of zlib-ng takes whole layers for damaged.
func TestNoProgramDecompresses_podman_23822_containerd_14084(t *testing.T) {
	n := newNode(t)
	for _, name := range []string{"pigz", "gzip", "zstd"} {
		ok(t, program.Write(filepath.Join(n.dir, name), []byte("#!/bin/sh\necho 'skipping: <stdin>: corrupted -- crc32 mismatch' >&2\nexit 1\n")))
	}
	zipped := layer(t, image.Text("gzip", "no program"))
	packed := layer(t, image.Text("zstd", "no program either"))
	packed.Blob = zstdOf(t, contentOf(t, packed))
	packed.Digest = digest.FromBytes(packed.Blob)
	t.Setenv("PATH", n.dir+":"+os.Getenv("PATH")) // workers get it
	n.pull(serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{zipped, packed}})).Addr() + "/app:1")
}

// repeated is a zstd frame of so many blocks that repeat one byte, 128 KiB each.
func repeated(blocks int) []byte {
	const size = 128<<10<<3 | 1<<1 // the type of such a block
	block := []byte{size & 0xff, size >> 8 & 0xff, size >> 16 & 0xff, 0}
	return slices.Concat(frame(7, 0)[:6], bytes.Repeat(block, blocks), []byte{1, 0, 0})
}

// Four bytes of zstd make 128 KiB, so that some megabytes would keep a pull busy for
// hours. The error names the layer.
func TestLayerThatExpandsIsRefused(t *testing.T) {
	t.Parallel()
	d := newDisk(t, 64)
	n := newNode(t, func(c *Options) { c.Root = filepath.Join(d.path, "root") })
	bomb := repeated(16 << 20) // 2 TiB
	greedy := image.Layer{Blob: bomb, Digest: digest.FromBytes(bomb), DiffID: someDigest}
	r := serve(t, "app", "bad", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("a", "b")), greedy}}))
	_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"})
	if !errors.Is(err, fault.Exhausted) || !strings.Contains(err.Error(), greedy.Digest.String()) {
		t.Errorf("%v", err)
	}
	n.empty()
}

// zstd:chunked layers have several zstd frames, and those of pzstd begin with one to skip.
func TestZstdLayers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	zipped := layer(t, image.Text("file", "content"))
	stream, err := archive.DecompressStream(bytes.NewReader(zipped.Blob))
	if err != nil {
		t.Fatal(err)
	}
	tar, err := io.ReadAll(stream)
	if err != nil {
		t.Fatal(err)
	}
	framed := bytes.Join([][]byte{skippable("size"), skippable(""), zstdOf(t, tar[:700]), skippable("toc"), zstdOf(t, tar[700:]), frame(17, 0)}, nil)
	a := build(t, image.Image{Layers: []image.Layer{{Blob: framed, Digest: digest.FromBytes(framed), DiffID: zipped.DiffID}}})
	img := n.pull(serve(t, "app", "1", a).Addr() + "/app:1")
	if len(n.puller.LargeWindows) != 0 {
		t.Error("the pull has kept its turn to have large windows")
	}
	root := n.rootfs("c", img.ID)
	n.mount(root)
	if got := n.read(root, "file"); got != "content" {
		t.Errorf("the file holds %q", got)
	}
	n.removeRootfs(root)
}
