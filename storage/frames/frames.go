// Package frames parses the headers in a stream of zstd (RFC 8878) as it passes: they say how much
// memory and disk its decompression takes.
package frames

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// MaxBlock is the largest size to which a zstd block decompresses, in bytes (RFC 8878, 3.1.1.2.4).
const MaxBlock = 128 << 10

// ErrInvalid is in the error of a stream that is not zstd.
var ErrInvalid = errors.New("invalid zstd")

var (
	magic     = []byte("\x28\xb5\x2f\xfd")
	skipMagic = []byte("\x2a\x4d\x18") // after a byte of 0x50 to 0x5f
)

// MagicSize is how many bytes Begin needs.
const MagicSize = 4

// skipHeader is the size of the header of a skippable frame, in bytes.
const skipHeader = MagicSize + 4

// Begin reports whether a stream that begins with these bytes is zstd. Its first frame may be one
// that is skipped, as pzstd writes it.
func Begin(head []byte) bool { return bytes.HasPrefix(head, magic) || skipped(head) }

// MayBegin reports whether the first bytes of a stream, which need not be MagicSize, may be those of
// zstd.
func MayBegin(head []byte) bool {
	return bytes.HasPrefix(magic, head) || Begin(head) ||
		len(head) < MagicSize && head[0]&0xf0 == 0x50 && bytes.HasPrefix(skipMagic, head[1:])
}

func skipped(head []byte) bool {
	return len(head) >= MagicSize && head[0]&0xf0 == 0x50 && bytes.HasPrefix(head[1:], skipMagic)
}

// Parser parses a stream.
type Parser struct {
	Window func(bytes uint64) error // called for the window of each frame
	Block  func(bytes int64) error  // called for each block, with what it decompresses to at most; nil: nobody

	step func(*Parser) error // parses head; nil: at the beginning
	head []byte              // for step, as far as it has come
	skip uint64              // bytes before head
	sum  uint64              // bytes of checksum after the frame
}

// Parse parses the next bytes of the stream. The error is ErrInvalid, or that of a function. After an
// error the parser must not be used.
func (p *Parser) Parse(b []byte) error {
	if p.step == nil {
		p.step = (*Parser).frame
	}
	for len(b) > 0 {
		if passed := min(p.skip, uint64(len(b))); passed > 0 {
			p.skip -= passed
			b = b[passed:]
			continue
		}
		p.head = append(p.head, b[0])
		b = b[1:]
		if err := p.step(p); err != nil {
			return err
		}
	}
	return nil
}

// next makes step parse the bytes that come after skip bytes.
func (p *Parser) next(step func(*Parser) error, skip uint64) error {
	p.step, p.skip, p.head = step, skip, p.head[:0]
	return nil
}

// frame parses the first bytes of a frame.
func (p *Parser) frame() error {
	switch {
	case len(p.head) < MagicSize:
		return nil
	case bytes.HasPrefix(p.head, magic):
		return p.next((*Parser).header, 0)
	case !skipped(p.head):
		return fmt.Errorf("invalid data after a zstd frame: %w", ErrInvalid)
	case len(p.head) < skipHeader:
		return nil
	}
	return p.next((*Parser).frame, uint64(binary.LittleEndian.Uint32(p.head[MagicSize:])))
}

// header parses the header of a frame (RFC 8878, 3.1.1.1).
func (p *Parser) header() error {
	descriptor := p.head[0]
	single := descriptor&(1<<5) != 0
	sizes := struct{ window, dictionary, content int }{1, []int{0, 1, 2, 4}[descriptor&3], []int{0, 2, 4, 8}[descriptor>>6]}
	if single {
		sizes.window, sizes.content = 0, max(sizes.content, 1)
	}
	if len(p.head) < 1+sizes.window+sizes.dictionary+sizes.content {
		return nil
	}
	var window uint64
	if single {
		field := make([]byte, 8)
		copy(field, p.head[1+sizes.dictionary:])
		window = binary.LittleEndian.Uint64(field)
	} else {
		base := uint64(1) << (10 + p.head[1]>>3)
		window = base + base/8*uint64(p.head[1]&7)
	}
	if err := p.Window(window); err != nil {
		return err
	}
	p.sum = 0
	if descriptor&(1<<2) != 0 {
		p.sum = 4
	}
	return p.next((*Parser).block, 0)
}

// block parses the header of a block (RFC 8878, 3.1.1.2).
func (p *Parser) block() error {
	if len(p.head) < 3 {
		return nil
	}
	header := uint64(p.head[0]) | uint64(p.head[1])<<8 | uint64(p.head[2])<<16
	size := header >> 3
	expanded := size
	switch header >> 1 & 3 {
	case 1:
		size = 1 // a byte that is repeated
	case 2:
		expanded = MaxBlock
	case 3:
		return fmt.Errorf("block of unknown type: %w", ErrInvalid)
	}
	if p.Block != nil {
		if err := p.Block(int64(expanded)); err != nil {
			return err
		}
	}
	if header&1 != 0 { // the last one
		return p.next((*Parser).frame, size+p.sum)
	}
	return p.next((*Parser).block, size)
}
