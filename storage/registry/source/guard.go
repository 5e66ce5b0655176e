package source

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
)

// Limits of the window of a zstd frame, which is the memory that decompressing a layer takes. The
// library has no limit below 512 MiB.
const (
	maxWindow   = 128 << 20 // bytes; the zstd program has the same limit by default
	smallWindow = 8 << 20   // bytes, which every decoder should support (RFC 8878); larger ones are rare
)

// maxBlock is the largest size to which a zstd block decompresses, in bytes (RFC 8878, 3.1.1.2.4).
const maxBlock = 128 << 10

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

	step func(*layerGuard) error // parses head; nil: at the beginning
	head []byte                  // for step, as far as it has come
	skip uint64                  // bytes before head
	rest bool                    // the rest of the layer needs no parsing
	sum  uint64                  // bytes of checksum after the frame
	err  error
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
	if g.step == nil {
		g.step = (*layerGuard).format
	}
	for len(p) > 0 && !g.rest {
		if passed := min(g.skip, uint64(len(p))); passed > 0 {
			g.skip -= passed
			p = p[passed:]
			continue
		}
		g.head = append(g.head, p[0])
		p = p[1:]
		if err := g.step(g); err != nil {
			return err
		}
	}
	return nil
}

// next makes step parse the bytes that come after skip bytes.
func (g *layerGuard) next(step func(*layerGuard) error, skip uint64) error {
	g.step, g.skip, g.head = step, skip, g.head[:0]
	return nil
}

func (g *layerGuard) refuse(format string, args ...any) error {
	return fmt.Errorf("layer %s: %s; build the image with gzip or ordinary zstd layers: %w", g.layer, fmt.Sprintf(format, args...), fault.Invalid)
}

var (
	xzMagic    = []byte("\xfd7zXZ\x00")
	bzip2Magic = []byte("BZh")
	zstdMagic  = []byte("\x28\xb5\x2f\xfd")
	skipMagic  = []byte("\x2a\x4d\x18") // after a byte of 0x50 to 0x5f
)

// format parses the first bytes of a layer.
func (g *layerGuard) format() error {
	switch {
	case bytes.Equal(g.head, zstdMagic):
		return g.next((*layerGuard).frameHeader, 0)
	case bytes.Equal(g.head, xzMagic):
		return g.refuse("it is compressed with xz")
	case bytes.Equal(g.head, bzip2Magic):
		return g.refuse("it is compressed with bzip2")
	}
	for _, magic := range [][]byte{zstdMagic, xzMagic, bzip2Magic} {
		if bytes.HasPrefix(magic, g.head) {
			return nil // too short to tell
		}
	}
	g.rest = true
	return nil
}

// frame parses the first bytes after a zstd frame.
func (g *layerGuard) frame() error {
	switch {
	case len(g.head) < len(zstdMagic):
		return nil
	case bytes.HasPrefix(g.head, zstdMagic):
		return g.next((*layerGuard).frameHeader, 0)
	case g.head[0]&0xf0 != 0x50 || !bytes.HasPrefix(g.head[1:], skipMagic):
		return g.refuse("invalid data after a zstd frame")
	case len(g.head) < 8:
		return nil
	}
	return g.next((*layerGuard).frame, uint64(binary.LittleEndian.Uint32(g.head[4:])))
}

// frameHeader parses the header of a zstd frame (RFC 8878, 3.1.1.1).
func (g *layerGuard) frameHeader() error {
	descriptor := g.head[0]
	single := descriptor&(1<<5) != 0
	sizes := struct{ window, dictionary, content int }{1, []int{0, 1, 2, 4}[descriptor&3], []int{0, 2, 4, 8}[descriptor>>6]}
	if single {
		sizes.window, sizes.content = 0, max(sizes.content, 1)
	}
	if len(g.head) < 1+sizes.window+sizes.dictionary+sizes.content {
		return nil
	}
	var window uint64
	if single {
		field := make([]byte, 8)
		copy(field, g.head[1+sizes.dictionary:])
		window = binary.LittleEndian.Uint64(field)
	} else {
		base := uint64(1) << (10 + g.head[1]>>3)
		window = base + base/8*uint64(g.head[1]&7)
	}
	if window > maxWindow {
		return g.refuse("zstd window of %d bytes exceeds the limit of %d", window, maxWindow)
	}
	if window > smallWindow {
		if err := g.admitLarge(); err != nil {
			return err
		}
	}
	g.sum = 0
	if descriptor&(1<<2) != 0 {
		g.sum = 4
	}
	return g.next((*layerGuard).block, 0)
}

// block parses the header of a zstd block (RFC 8878, 3.1.1.2).
func (g *layerGuard) block() error {
	if len(g.head) < 3 {
		return nil
	}
	header := uint64(g.head[0]) | uint64(g.head[1])<<8 | uint64(g.head[2])<<16
	size := header >> 3
	expanded := size
	switch header >> 1 & 3 {
	case 1:
		size = 1 // a byte that is repeated
	case 2:
		expanded = maxBlock
	case 3:
		return g.refuse("zstd block of unknown type")
	}
	if err := g.expansion.add(int64(expanded)); err != nil {
		return fmt.Errorf("layer %s: %w", g.layer, err)
	}
	if header&1 != 0 { // the last one
		return g.next((*layerGuard).frame, size+g.sum)
	}
	return g.next((*layerGuard).block, size)
}
