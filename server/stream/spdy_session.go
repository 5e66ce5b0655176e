package stream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/moby/spdystream/spdy"
)

// spdyConn is the connection of an exec or attach session on which SPDY/3.1 is spoken, as
// much of it as the few streams of such a session need.
//
// spdystream, which port-forwards use, compresses the headers that it sends. The memory for
// that, 0.8 MB, and its collection took half of the CPU time of an exec in this server. Here
// the headers that are sent are empty, and the frames with them are known (replies).
type spdyConn struct {
	net.Conn
	frames *spdy.Framer  // reads what the client sends
	pings  chan uint32   // to be answered
	count  int           // streams that have been confirmed
	ended  chan struct{} // nothing more comes from the client

	streams map[spdy.StreamId]*spdyStream // known to serve alone

	writing sync.Mutex
	buffer  []byte // of a frame
}

const (
	// mostStreams is more than the streams of any session.
	mostStreams = 8
	// mostQueued is how many pieces of largestPart a stream holds that is not read. More
	// hold up the others.
	mostQueued = 16
	// mostPings is how many pings are answered once the client reads again.
	mostPings = 8
	// largestFrame is as much as is sent in one frame.
	largestFrame = 1 << 20

	finFlag   = 0x01
	resetSize = 8
)

var errStreamClosed = errors.New("write on a closed stream")

// replies are the frames that confirm the streams of a connection, in their order, but for
// the stream's number. The compression of headers depends on those before, and on nothing
// else.
var replies = sync.OnceValue(func() (all [mostStreams][]byte) {
	var out bytes.Buffer
	if framer, err := spdy.NewFramer(&out, &out); err == nil {
		for i := range all {
			out.Reset()
			_ = framer.WriteFrame(&spdy.SynReplyFrame{StreamId: 1, Headers: http.Header{}})
			all[i] = bytes.Clone(out.Bytes())
		}
	}
	return all
})

func newSPDYConn(conn net.Conn) (*spdyConn, error) {
	framer, err := spdy.NewFramerWithOptions(io.Discard, conn,
		spdy.WithMaxControlFramePayloadSize(largestControl), spdy.WithMaxHeaderFieldSize(largestField), spdy.WithMaxHeaderCount(mostFields))
	return &spdyConn{
		Conn: conn, frames: framer, pings: make(chan uint32, mostPings), ended: make(chan struct{}), streams: make(map[spdy.StreamId]*spdyStream),
	}, err
}

// serve reads what the client sends until that ends, which ends all streams. take gets each
// stream that the client opens, confirmed, and says whether it has taken it. One that has
// been taken must be read or discarded.
func (c *spdyConn) serve(take func(*spdyStream) bool) {
	defer func() {
		for _, s := range c.streams {
			s.endInput()
		}
		close(c.ended)
	}()
	for {
		frame, err := c.frames.ReadFrame()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				_ = c.Close() // what follows would not be understood
			}
			return
		}
		switch f := frame.(type) {
		case *spdy.SynStreamFrame:
			c.open(f, take)
		case *spdy.DataFrame:
			if s := c.streams[f.StreamId]; s != nil {
				s.put(f.Data, f.Flags&spdy.DataFlagFin != 0)
			}
		case *spdy.RstStreamFrame:
			if s := c.streams[f.StreamId]; s != nil {
				s.closed.Store(true)
				s.endInput()
			}
		case *spdy.PingFrame:
			select {
			case c.pings <- f.Id:
			default:
			}
		case *spdy.GoAwayFrame:
			return
		}
	}
}

func (c *spdyConn) open(f *spdy.SynStreamFrame, take func(*spdyStream) bool) {
	s := &spdyStream{conn: c, id: f.StreamId, headers: f.Headers, queue: make(chan []byte, mostQueued), unread: make(chan struct{})}
	if c.count == mostStreams || c.confirm(f.StreamId) != nil || !take(s) {
		_ = c.reset(f.StreamId)
		return
	}
	c.streams[s.id] = s
	if f.CFHeader.Flags&spdy.ControlFlagFin != 0 {
		s.endInput()
	}
}

func (c *spdyConn) confirm(id spdy.StreamId) error {
	reply := bytes.Clone(replies()[c.count])
	binary.BigEndian.PutUint32(reply[frameHeader:], uint32(id))
	c.count++
	return c.send(reply, nil)
}

// reset refuses a stream.
func (c *spdyConn) reset(id spdy.StreamId) error {
	frame := binary.BigEndian.AppendUint32(nil, 0x80000000|spdy.Version<<16|rstStream)
	frame = binary.BigEndian.AppendUint32(frame, resetSize)
	frame = binary.BigEndian.AppendUint32(frame, uint32(id))
	return c.send(binary.BigEndian.AppendUint32(frame, uint32(spdy.Cancel)), nil)
}

// answerPings ends with serve. It is not part of it: a client that does not read its output
// may still send.
func (c *spdyConn) answerPings() {
	for {
		select {
		case id := <-c.pings:
			frame := binary.BigEndian.AppendUint32(nil, 0x80000000|spdy.Version<<16|uint32(spdy.TypePing))
			frame = binary.BigEndian.AppendUint32(frame, 4)
			if c.send(binary.BigEndian.AppendUint32(frame, id), nil) != nil {
				return
			}
		case <-c.ended:
			return
		}
	}
}

// send writes a frame at once.
func (c *spdyConn) send(header, payload []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.buffer = append(append(c.buffer[:0], header...), payload...)
	_, err := c.Write(c.buffer)
	return err
}

// spdyStream is one stream of a session.
type spdyStream struct {
	conn    *spdyConn
	id      spdy.StreamId
	headers http.Header

	queue  chan []byte // from the client; closed at its end
	over   bool        // queue is closed; known to serve alone
	left   []byte      // of a piece from the queue
	unread chan struct{}
	once   sync.Once
	closed atomic.Bool // nothing more is written
}

// put has serve wait if the queue is full.
func (s *spdyStream) put(data []byte, last bool) {
	if s.over {
		return
	}
	if len(data) > 0 {
		select {
		case <-s.unread:
		default:
			select {
			case s.queue <- data:
			case <-s.unread:
			}
		}
	}
	if last {
		s.endInput()
	}
}

func (s *spdyStream) endInput() {
	if !s.over {
		s.over = true
		close(s.queue)
	}
}

// discard has all that still comes thrown away.
func (s *spdyStream) discard() { s.once.Do(func() { close(s.unread) }) }

// Read reads what the client sends.
func (s *spdyStream) Read(p []byte) (int, error) {
	if len(s.left) == 0 {
		more, ok := <-s.queue
		if !ok {
			return 0, io.EOF
		}
		s.left = more
	}
	n := copy(p, s.left)
	s.left = s.left[n:]
	return n, nil
}

// Write sends data, and waits for a client that does not read.
func (s *spdyStream) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		if s.closed.Load() {
			return len(p) - len(rest), errStreamClosed
		}
		part := rest[:min(len(rest), largestFrame)]
		if err := s.send(part, 0); err != nil {
			return len(p) - len(rest), err
		}
		rest = rest[len(part):]
	}
	return len(p), nil
}

// Close tells the client that nothing more comes.
func (s *spdyStream) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	return s.send(nil, finFlag)
}

func (s *spdyStream) send(data []byte, flags uint32) error {
	var header [frameHeader]byte
	binary.BigEndian.PutUint32(header[:], uint32(s.id))
	binary.BigEndian.PutUint32(header[4:], flags<<24|uint32(len(data)))
	return s.conn.send(header[:], data)
}
