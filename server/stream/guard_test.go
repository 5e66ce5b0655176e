package stream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/moby/spdystream/spdy"
)

// said is a client's side of a connection.
type said struct {
	net.Conn
	io.Reader
}

func (s said) Read(p []byte) (int, error) { return s.Reader.Read(p) }

// heard are the frames that come through a guard, and why there are no more.
func heard(t *testing.T, text []byte) (frames []spdy.Frame, err error) {
	t.Helper()
	g := &guard{Conn: said{Reader: iotest.OneByteReader(bytes.NewReader(text))}}
	framer, err := spdy.NewFramer(io.Discard, g)
	if err != nil {
		t.Fatal(err)
	}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return frames, err
		}
		frames = append(frames, frame)
	}
}

func speak(t *testing.T, frames ...spdy.Frame) []byte {
	t.Helper()
	var text bytes.Buffer
	framer, err := spdy.NewFramer(&text, &text)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		if err := framer.WriteFrame(f); err != nil {
			t.Fatal(err)
		}
	}
	return text.Bytes()
}

func open(id spdy.StreamId) *spdy.SynStreamFrame {
	return &spdy.SynStreamFrame{StreamId: id, Headers: http.Header{"Streamtype": {"data"}}}
}

// What goes in comes out, in smaller parts.
func TestGuardPassesOn(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 1, largestPart - 1, largestPart, largestPart + 1, 3*largestPart + 7} {
		for _, flags := range []spdy.DataFlags{0, spdy.DataFlagFin} {
			data := bytes.Repeat([]byte("0123456789"), size/10+1)[:size]
			frames, err := heard(t, speak(t, open(1), open(3), &spdy.PingFrame{Id: 5},
				&spdy.DataFrame{StreamId: 3, Flags: flags, Data: data}, &spdy.PingFrame{Id: 7}))
			if !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			if got := frames[0].(*spdy.SynStreamFrame); got.StreamId != 1 || got.Headers.Get("streamType") != "data" {
				t.Errorf("stream %+v", got)
			}
			var got []byte
			parts := frames[3 : len(frames)-1]
			for i, f := range parts {
				part := f.(*spdy.DataFrame)
				got = append(got, part.Data...)
				last := i == len(parts)-1
				if part.StreamId != 3 || len(part.Data) > largestPart || (part.Flags == spdy.DataFlagFin) != (last && flags != 0) {
					t.Errorf("size %d, part %d of %d: stream %d, flags %d, %d bytes", size, i, len(parts), part.StreamId, part.Flags, len(part.Data))
				}
			}
			if !bytes.Equal(got, data) {
				t.Errorf("%d bytes of %d came through, or others", len(got), size)
			}
			if last := frames[len(frames)-1].(*spdy.PingFrame); last.Id != 7 {
				t.Errorf("after it %+v", last)
			}
		}
	}
}

// CVE-2026-35469: what would cost too much ends the connection.
func TestGuardRefuses_CVE_2026_35469(t *testing.T) {
	t.Parallel()
	large := binary.BigEndian.AppendUint32([]byte{0x80, 3, 0, 4}, largestControl+1) // SETTINGS
	for name, text := range map[string][]byte{
		"control frame":  append(large, make([]byte, largestControl+1)...),
		"stream 0":       speak(t, open(3), open(1)),
		"after stream 3": speak(t, open(3), open(3)),
	} {
		frames, err := heard(t, text)
		if err == nil || errors.Is(err, io.EOF) || len(frames) > 1 {
			t.Errorf("%s: %d frames, then %v", name, len(frames), err)
		}
	}
	if _, err := heard(t, speak(t, open(3), open(1))); err == nil || !strings.Contains(err.Error(), "stream 1 opened after stream 3") {
		t.Errorf("%v", err)
	}
	for n := range 12 {
		if _, err := heard(t, speak(t, open(1))[:n]); err == nil {
			t.Errorf("%d bytes are a frame", n)
		}
	}
}

func FuzzGuard(f *testing.F) {
	f.Add([]byte{0x80, 3, 0, 1, 0, 0, 0, 4, 0, 0, 0, 1})
	f.Add([]byte{0, 0, 0, 1, 1, 0, 0, 1, 'x'})
	f.Fuzz(func(t *testing.T, text []byte) {
		g := &guard{Conn: said{Reader: bytes.NewReader(text)}}
		n, err := io.Copy(io.Discard, io.LimitReader(g, 1<<20))
		if parts := int64(len(text))/largestPart + 1; n > int64(len(text))+8*parts {
			t.Errorf("%d bytes made of %d (%v)", n, len(text), err)
		}
	})
}

// packets are what is written to a connection, write by write.
type packets struct {
	net.Conn
	written [][]byte
}

func (p *packets) Write(b []byte) (int, error) {
	p.written = append(p.written, bytes.Clone(b))
	return len(b), nil
}

func TestEachFrameIsOneWrite(t *testing.T) {
	t.Parallel()
	frames := []spdy.Frame{
		&spdy.SynReplyFrame{StreamId: 1, Headers: http.Header{}},
		&spdy.DataFrame{StreamId: 1, Data: bytes.Repeat([]byte("x"), 70_000)},
		&spdy.DataFrame{StreamId: 1, Data: []byte("y")},
		&spdy.PingFrame{Id: 2},
		&spdy.DataFrame{StreamId: 1, Flags: spdy.DataFlagFin},
		&spdy.RstStreamFrame{StreamId: 1, Status: spdy.Cancel},
		&spdy.GoAwayFrame{},
	}
	var conn packets
	framer, err := spdy.NewFramer(&wholeFrames{Conn: &conn}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var want [][]byte
	var all bytes.Buffer
	plain, err := spdy.NewFramer(&all, nil) // headers are compressed with those before
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		if err := errors.Join(plain.WriteFrame(f), framer.WriteFrame(f)); err != nil {
			t.Fatal(err)
		}
		want = append(want, bytes.Clone(all.Bytes()))
		all.Reset()
	}
	if len(conn.written) != len(want) {
		t.Fatalf("%d writes for %d frames", len(conn.written), len(want))
	}
	for i := range want {
		if !bytes.Equal(conn.written[i], want[i]) {
			t.Errorf("frame %d: %q instead of %q", i, conn.written[i], want[i])
		}
	}
}
