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
type inParts struct {
	http.ResponseWriter
	base64 bool // the protocol's payloads are in base64
}

// Hijack implements http.Hijacker.
func (p inParts) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(p.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	return conn, bufio.NewReadWriter(bufio.NewReader(&frameGuard{r: buffered.Reader, base64: p.base64}), buffered.Writer), nil
}

// frameGuard reads the frames of a WebSocket whose messages begin with the byte of
// a channel. The library takes each frame into memory as a whole, up to 32 MiB; so
// one with more than largestPart comes out as several for the same channel. That
// is the same to whoever reads the channel: in protocols with base64, too, as
// parts are multiples of four characters. The library also takes each frame for a
// message, and the first byte of one that continues a message for its channel; so
// such a frame comes out with the channel of its message. It also decodes each by itself:
// characters of base64 that do not make four come out with the next frame.
type frameGuard struct {
	r      io.Reader
	base64 bool // the payloads of the protocol are in base64

	left []byte // header to be passed on
	part uint64 // payload to be passed on before the next header
	rest uint64 // payload of the same frame after that
	tail uint64 // payload of the same frame after that, to be held

	begin [1 + 4 + 1]byte // of each part: the frame's first byte, masking key, and channel
	held  []byte          // characters that come between begin and the payload of the next part

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
	switch {
	case g.rest > 0:
		g.nextPart()
		return nil
	case g.tail > 0:
		return g.hold()
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
	g.begin[0] = header[0] | final
	if _, err := io.ReadFull(g.r, g.begin[1:]); err != nil {
		return err
	}
	if header[0]&final == 0 {
		g.message, g.channel = g.begin[0], g.begin[1]^g.begin[5]
	}
	g.divide(size-1, g.message == 0)
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

// nextFragment prepares a frame that continues a message. Behind the channel and what is held, its
// payload is masked by the same key, which begins as many bytes later.
func (g *frameGuard) nextFragment(size uint64, last bool) error {
	if g.message == 0 {
		return errFrame
	}
	var key [4]byte
	if _, err := io.ReadFull(g.r, key[:]); err != nil {
		return err
	}
	g.begin[0] = g.message
	for i := range key {
		g.begin[1+i] = key[(i+3-len(g.held))%4]
	}
	g.begin[5] = g.channel ^ g.begin[1]
	if last {
		g.message = 0
	}
	g.divide(size, last)
	return nil
}

// divide says how much of a payload that follows begin is passed on in parts, and how much is held.
func (g *frameGuard) divide(size uint64, last bool) {
	g.rest = size
	if g.base64 && !last {
		g.tail = min(size, (uint64(len(g.held))+size)%4)
		g.rest -= g.tail
	}
	if g.rest > 0 || last && len(g.held) > 0 {
		g.nextPart()
	}
}

// hold reads the end of a payload.
func (g *frameGuard) hold() error {
	tail := make([]byte, g.tail)
	if _, err := io.ReadFull(g.r, tail); err != nil {
		return err
	}
	g.tail = 0
	for _, c := range tail {
		g.held = append(g.held, c^g.mask(len(g.held)))
	}
	return nil
}

// mask returns what masks a byte of a part, that many behind the channel.
func (g *frameGuard) mask(at int) byte { return g.begin[1+(1+at)%4] }

// nextPart prepares a part whose payload is masked as it was: its length, with what was held, is a
// multiple of the key's.
func (g *frameGuard) nextPart() {
	const lengthFollows = 126
	g.part = min(g.rest, largestPart-uint64(len(g.held)))
	g.rest -= g.part
	size := 1 + uint64(len(g.held)) + g.part
	header := []byte{g.begin[0], masked | byte(size)}
	if size >= lengthFollows {
		header = binary.BigEndian.AppendUint16([]byte{g.begin[0], masked | lengthFollows}, uint16(size))
	}
	g.left = append(header, g.begin[1:]...)
	for i, c := range g.held {
		g.left = append(g.left, c^g.mask(i))
	}
	g.held = nil
}
