package stream

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/crius-run/crius/test/kit/wait"
)

// A clock that is set must neither cut all sessions off nor let silent ones
// stay. The time of day is no part of what is kept: a connection of a thousand
// hours ago has been silent for as long as it says.
func TestSilenceIsNotTakenFromTheClock(t *testing.T) {
	c := &conn{began: time.Now().Add(-1000 * time.Hour)}
	if silent := c.silence(); silent < 1000*time.Hour || silent > 1001*time.Hour {
		t.Errorf("before anything was said: %v", silent)
	}
	c.use(1)
	if kept := time.Duration(c.used.Load()); kept > 1001*time.Hour { // since 1970 it would be half a million
		t.Errorf("the time of day is kept: %v", kept)
	}
	if silent := c.silence(); silent > time.Hour {
		t.Errorf("just after something was said: %v", silent)
	}
}

// Who reads slowly, and talks meanwhile as kubectl's connections do, is given
// everything that was written before Close; who does not read is not waited for.
func TestCloseWaitsForWhoReads(t *testing.T) {
	t.Parallel()
	h, err := newHangups()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		l.Close()
		h.abortAll()
		h.close()
	}()
	last := bytes.Repeat([]byte("last words "), 100_000)
	slow, server := parting(t, watched{l, h}, last)
	deaf, other := parting(t, watched{l, h}, last)
	began := time.Now()
	server.Close()
	other.Close()
	pace := time.NewTicker(3 * moment / time.Duration(len(last)/(16<<10)))
	defer pace.Stop()
	var got []byte
	for piece := make([]byte, 16<<10); err == nil; <-pace.C {
		_, _ = slow.Write([]byte("ping"))
		var n int
		n, err = slow.Read(piece)
		got = append(got, piece[:n]...)
	}
	if took := time.Since(began); !errors.Is(err, io.EOF) || !bytes.Equal(got, last) || took < 2*moment {
		t.Errorf("%d of %d bytes after %v, then %v", len(got), len(last), took, err)
	}
	slow.Close()
	wait.For(t, "the connection of a client that does not read to be let go of", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.conns) == 0
	})
	deaf.Close()
}

// parting is a connection whose server has said its last words.
func parting(t *testing.T, l watched, last []byte) (*net.TCPConn, *conn) {
	t.Helper()
	client, err := net.DialTCP("tcp", nil, l.Addr().(*net.TCPAddr))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	server := accepted.(*conn)
	for _, err := range []error{
		client.SetReadBuffer(32 << 10), server.SetWriteBuffer(4 << 20),
		client.SetDeadline(time.Now().Add(2 * time.Minute)), server.SetDeadline(time.Now().Add(time.Minute)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := server.Write(last); err != nil {
		t.Fatal(err)
	}
	return client, server
}

// Connections without a ticket are taken up to a limit, in which those with one
// do not count.
func TestStrangersAreBounded(t *testing.T) {
	t.Parallel()
	h, err := newHangups()
	if err != nil {
		t.Fatal(err)
	}
	h.most = 2
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	taken := make(chan *conn, 10)
	go func() {
		defer close(taken)
		for {
			c, err := watched{l, h}.Accept()
			if err != nil {
				return
			}
			taken <- c.(*conn)
		}
	}()
	defer func() {
		l.Close()
		h.abortAll()
		h.close()
	}()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	dial()
	first := <-taken
	dial()
	second := <-taken
	refused := func() {
		t.Helper()
		if n, err := dial().Read(make([]byte, 1)); err == nil {
			t.Errorf("one too many was taken, and read %d bytes", n)
		}
	}
	refused()
	first.introduce()
	first.introduce()
	dial()
	<-taken
	refused()
	if err := second.abort(); err != nil {
		t.Error(err)
	}
	dial()
	<-taken
	refused()
}
