package stream

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
)

// inParts is the answer to a request whose connection becomes a WebSocket with
// channels: large frames reach the library in parts.
type inParts struct{ http.ResponseWriter }

// Hijack implements http.Hijacker.
func (p inParts) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(p.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	return conn, bufio.NewReadWriter(bufio.NewReader(&frameGuard{r: buffered.Reader}), buffered.Writer), nil
}

// frameGuard reads the frames of a WebSocket whose messages begin with the byte of
// a channel. The library takes each frame into memory as a whole, up to 32 MiB; so
// one with more than largestPart comes out as several for the same channel. That
// is the same to whoever reads the channel: in protocols with base64, too, as
// parts are multiples of four characters. The library also takes each frame for a
// message, and the first byte of one that continues a message for its channel; so
// such a frame comes out with the channel of its message.
type frameGuard struct {
	r    io.Reader
	left []byte // header to be passed on
	part uint64 // payload to be passed on before the next header
	rest uint64 // payload of the same frame after that

	begin [1 + 4 + 1]byte // of each part: the frame's first byte, masking key, and channel

	message, channel byte // first byte and channel of a message that goes on; 0: there is none
}

// masked is set in the second byte of frames with a masking key.
const masked = 0x80

var errFrame = errors.New("invalid WebSocket frame (RFC 6455)")

func (g *frameGuard) Read(p []byte) (int, error) {
	for len(g.left) == 0 && g.part == 0 {
		if err := g.next(); err != nil {
			return 0, err
		}
	}
	if len(g.left) > 0 {
		n := copy(p, g.left)
		g.left = g.left[n:]
		return n, nil
	}
	n, err := g.r.Read(p[:min(uint64(len(p)), g.part)])
	g.part -= uint64(n)
	return n, err
}

// next prepares the header of the next frame, or of the next part of one, with
// the channel (RFC 6455, 5.2).
func (g *frameGuard) next() error {
	const final, opcode, control = 0x80, 0x0f, 0x08
	const largestControl = 125
	if g.rest > 0 {
		g.nextPart()
		return nil
	}
	header, size, err := g.header()
	if err != nil {
		return err
	}
	switch header[0] & opcode {
	case 0, 1, 2: // data
	case 8, 9, 10:
		if size > largestControl {
			return errFrame
		}
	default: // reserved; the library takes them for data, of any size
		return errFrame
	}
	asItIs := header[0]&control != 0 || header[1]&masked == 0 // the library refuses what has no mask
	switch {
	case !asItIs && header[0]&opcode == 0:
		return g.nextFragment(size, header[0]&final != 0)
	case !asItIs && g.message != 0:
		return errFrame
	case asItIs, size == 0, size <= largestPart && header[0]&final != 0:
		g.left, g.part = header, size
		if header[1]&masked != 0 {
			g.part += 4
		}
		return nil
	}
	g.begin[0], g.rest = header[0]|final, size-1
	if _, err := io.ReadFull(g.r, g.begin[1:]); err != nil {
		return err
	}
	if header[0]&final == 0 {
		g.message, g.channel = g.begin[0], g.begin[1]^g.begin[5]
	}
	g.nextPart()
	return nil
}

// header reads the header of a frame without its masking key, and the payload's size.
func (g *frameGuard) header() (header []byte, size uint64, err error) {
	header = make([]byte, 2, 2+8+4)
	if _, err := io.ReadFull(g.r, header); err != nil {
		return nil, 0, err
	}
	size = uint64(header[1] &^ masked)
	switch size {
	case 126:
		header = header[:4]
	case 127:
		header = header[:10]
	}
	if _, err := io.ReadFull(g.r, header[2:]); err != nil {
		return nil, 0, err
	}
	switch len(header) {
	case 4:
		size = uint64(binary.BigEndian.Uint16(header[2:]))
	case 10:
		size = binary.BigEndian.Uint64(header[2:]) &^ (1 << 63)
	}
	return header, size, nil
}

// nextFragment prepares a frame that continues a message. With the channel before it, its payload
// is masked by the same key, which begins one byte later.
func (g *frameGuard) nextFragment(size uint64, last bool) error {
	if g.message == 0 {
		return errFrame
	}
	var key [4]byte
	if _, err := io.ReadFull(g.r, key[:]); err != nil {
		return err
	}
	g.begin = [...]byte{g.message, key[3], key[0], key[1], key[2], g.channel ^ key[3]}
	if last {
		g.message = 0
	}
	if g.rest = size; size > 0 {
		g.nextPart()
	}
	return nil
}

// nextPart prepares a part whose payload is masked as it was: its length is a
// multiple of the key's.
func (g *frameGuard) nextPart() {
	const lengthFollows = 126
	g.part = min(g.rest, largestPart)
	g.rest -= g.part
	header := []byte{g.begin[0], masked | byte(1+g.part)}
	if 1+g.part >= lengthFollows {
		header = binary.BigEndian.AppendUint16([]byte{g.begin[0], masked | lengthFollows}, uint16(1+g.part))
	}
	g.left = append(header, g.begin[1:]...)
}
