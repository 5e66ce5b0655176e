package stream

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
)

const (
	frameHeader = 8
	synStream   = 1
	rstStream   = 3

	// largestPart is how much of a client's data frame the libraries get at once.
	// spdystream queues up to fifty frames of streams that nobody reads, in each of
	// five queues: 4 MiB of a connection.
	largestPart = 16 << 10
	// largestControl is far more than the headers of any stream need, and these are
	// queued likewise.
	largestControl = 16 << 10
	largestField   = 1 << 10
	mostFields     = 8
)

// guard reads what a client says in SPDY and keeps from spdystream what would cost
// the server too much (CVE-2026-35469): data frames, which may have 16 MiB, come in
// parts; a control frame that is too large, or a stream whose number is not higher
// than the last one's, ends the connection, for the library would answer each such
// stream with a goroutine of its own.
type guard struct {
	net.Conn
	reset func(stream uint32) // called when the client resets a stream, before what it has sent on it is read; nil: nothing is

	head [frameHeader + 4]byte // of the frame that is passed on
	left []byte                // of head
	part int                   // payload to be passed on before the next header
	rest int                   // payload of the same frame after that
	last uint32                // highest number of a stream
}

func (g *guard) Read(p []byte) (int, error) {
	if len(g.left) == 0 && g.part == 0 {
		if err := g.next(); err != nil {
			return 0, err
		}
	}
	if len(g.left) > 0 {
		n := copy(p, g.left)
		g.left = g.left[n:]
		return n, nil
	}
	n, err := g.Conn.Read(p[:min(len(p), g.part)])
	g.part -= n
	return n, err
}

// next prepares the header of the next frame, or of the next part of one.
func (g *guard) next() error {
	const control, fin = 0x80, 0x01
	header := g.head[:frameHeader]
	size := g.rest
	if size == 0 {
		if _, err := io.ReadFull(g.Conn, header); err != nil {
			return err
		}
		size = frameSize(header)
	}
	g.left = header
	if header[0]&control != 0 {
		return g.control(size)
	}
	g.part = min(size, largestPart)
	g.rest = size - g.part
	flags := header[4] &^ fin
	if g.rest == 0 {
		flags = header[4]
	}
	// The flags of the frame are needed for its last part: the copy is changed.
	g.left = binary.BigEndian.AppendUint32(append([]byte(nil), header[:4]...), uint32(flags)<<24|uint32(g.part))
	return nil
}

func (g *guard) control(size int) error {
	if size > largestControl {
		return fmt.Errorf("SPDY control frame has %d bytes, more than %d", size, largestControl)
	}
	g.part = size
	kind := binary.BigEndian.Uint16(g.head[2:])
	if kind != synStream && kind != rstStream || size < 4 {
		return nil
	}
	if _, err := io.ReadFull(g.Conn, g.head[frameHeader:]); err != nil {
		return err
	}
	g.left, g.part = g.head[:], size-4
	stream := binary.BigEndian.Uint32(g.head[frameHeader:]) & (1<<31 - 1)
	if kind == rstStream {
		if g.reset != nil {
			g.reset(stream)
		}
		return nil
	}
	if stream <= g.last {
		return fmt.Errorf("SPDY stream %d opened after stream %d: ids must increase", stream, g.last)
	}
	g.last = stream
	return nil
}

// wholeFrames is a connection to which each frame is written at once. spdystream
// writes fields, which would be a system call and a packet each, or a message in a
// WebSocket. Only one goroutine may write.
type wholeFrames struct {
	net.Conn
	frame []byte // that has begun
}

func (w *wholeFrames) Write(p []byte) (int, error) {
	w.frame = append(w.frame, p...)
	if len(w.frame) < frameHeader || len(w.frame) < frameHeader+frameSize(w.frame) {
		return len(p), nil
	}
	_, err := w.Conn.Write(w.frame)
	w.frame = w.frame[:0]
	return len(p), err
}

// frameSize returns how much follows the header of a frame.
func frameSize(header []byte) int { return int(binary.BigEndian.Uint32(header[4:]) & (1<<24 - 1)) }
