package source

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/frames"
)

// Limits of the window of a zstd frame, which is the memory that decompressing a layer takes. The
// library has no limit below 512 MiB.
const (
	maxWindow   = 128 << 20 // bytes; the zstd program has the same limit by default
	smallWindow = 8 << 20   // bytes, which every decoder should support (RFC 8878); larger ones are rare
)

// maxExpansion is the factor by which a layer may grow when it is decompressed, even on a full
// disk. It is the maximum of deflate, so an image that gzip could hold is never refused. Four bytes
// of zstd make 128 KiB, 32768 times as many.
const maxExpansion = 1032

// minRoom replaces the free space of a disk that has less: small images still fit there.
const minRoom = 1 << 30 // bytes

// ErrExpands is in the error of a layer that decompresses to too much.
var ErrExpands = errors.New("layer decompresses to more than allowed")

// expansion bounds the bytes to which the layers of an image decompress in total. Layers that
// exceed the free space cannot be unpacked anyway, but they would be decompressed, twice if most of
// the bytes come after the end of the archive.
type expansion struct {
	room     int64        // bytes that are free in the image store
	came     atomic.Int64 // compressed bytes of layers
	expanded atomic.Int64 // bytes to which zstd blocks decompress at most
}

// add counts a zstd block that decompresses to bytes at most. It fails with ErrExpands when the
// total exceeds the limit.
func (e *expansion) add(bytes int64) error {
	most := max(minRoom, e.room, e.came.Load()*maxExpansion)
	if e.expanded.Add(bytes) <= most {
		return nil
	}
	return fmt.Errorf("%w: with the layers before it, more than %d bytes, which do not fit into the image store; free disk space, or rebuild the image: %w",
		ErrExpands, most, fault.Exhausted)
}

// layerGuard passes on a layer as it comes from a registry, until decompressing it would take too
// much memory, or it has as many bytes as its manifest says. The first bytes of a layer decide how
// the library decompresses it, whatever its media type says.
//
// It refuses xz, whose reader allocates up to 4 GiB if the stream asks for it, and bzip2: neither
// has a media type in OCI or Docker. It also refuses each frame of a zstd layer whose window is too
// large.
type layerGuard struct {
	io.ReadCloser
	layer      digest.Digest
	admitLarge func() error  // waits until a window above smallWindow may be used
	answers    *atomic.Int64 // counts reads under way
	expansion  *expansion
	left       int64 // bytes that may still come

	head   []byte         // the first bytes, until they say what the layer is
	zstd   *frames.Parser // nil: it is not known yet, or something else
	passes bool           // the rest of the layer needs no parsing
	err    error
}

// Read implements io.Reader.
func (g *layerGuard) Read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	g.answers.Add(1)
	n, err := g.ReadCloser.Read(p)
	g.answers.Add(-1)
	if int64(n) >= g.left {
		n, err = int(g.left), io.EOF // even if the registry sends more
	}
	g.left -= int64(n)
	g.expansion.came.Add(int64(n))
	if g.err = g.check(p[:n]); g.err != nil {
		return 0, g.err
	}
	return n, err
}

func (g *layerGuard) check(p []byte) error {
	for ; len(p) > 0 && !g.passes && g.zstd == nil; p = p[1:] {
		g.head = append(g.head, p[0])
		if err := g.format(); err != nil {
			return err
		}
	}
	if g.zstd == nil {
		return nil
	}
	err := g.zstd.Parse(p)
	if errors.Is(err, frames.ErrInvalid) {
		return g.refuse("%v", err)
	}
	return err
}

func (g *layerGuard) refuse(format string, args ...any) error {
	return fmt.Errorf("layer %s: %s; build the image with gzip or ordinary zstd layers: %w", g.layer, fmt.Sprintf(format, args...), fault.Invalid)
}

var (
	xzMagic    = []byte("\xfd7zXZ\x00")
	bzip2Magic = []byte("BZh")
)

// format parses the first bytes of a layer.
func (g *layerGuard) format() error {
	switch {
	case frames.Begin(g.head):
		g.zstd = &frames.Parser{Window: g.window, Block: g.block}
		return g.zstd.Parse(g.head)
	case bytes.Equal(g.head, xzMagic):
		return g.refuse("it is compressed with xz")
	case bytes.Equal(g.head, bzip2Magic):
		return g.refuse("it is compressed with bzip2")
	}
	g.passes = !frames.MayBegin(g.head) && !bytes.HasPrefix(xzMagic, g.head) && !bytes.HasPrefix(bzip2Magic, g.head)
	return nil
}

// window checks the window of a zstd frame.
func (g *layerGuard) window(bytes uint64) error {
	if bytes > maxWindow {
		return g.refuse("zstd window of %d bytes exceeds the limit of %d", bytes, maxWindow)
	}
	if bytes > smallWindow {
		return g.admitLarge()
	}
	return nil
}

// block counts a zstd block that decompresses to so many bytes at most.
func (g *layerGuard) block(bytes int64) error {
	if err := g.expansion.add(bytes); err != nil {
		return fmt.Errorf("layer %s: %w", g.layer, err)
	}
	return nil
}
