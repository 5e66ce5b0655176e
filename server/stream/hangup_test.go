package stream

import (
	"bytes"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/test/kit/wait"
)

// A clock that is set must neither cut all sessions off nor let silent ones
// stay. The time of day is no part of what is kept: a connection of a thousand
// hours ago has been silent for as long as it says.
func TestIdleTimeIgnoresClockChanges(t *testing.T) {
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
// A client that does not get to read for a while loses nothing, whatever it says
// meanwhile.
func TestCloseWaitsForWhoReads(t *testing.T) {
	t.Parallel()
	_, l := listening(t)
	last := bytes.Repeat([]byte("last words "), 100_000)
	client, server := parting(t, l, last)
	server.Close()
	time.Sleep(3 * moment) // as on a machine that has other things to do
	var got []byte
	var err error
	for piece := make([]byte, 16<<10); err == nil; {
		_, _ = client.Write([]byte("ping"))
		var n int
		n, err = client.Read(piece)
		got = append(got, piece[:n]...)
	}
	if !errors.Is(err, io.EOF) || !bytes.Equal(got, last) {
		t.Errorf("%d of %d bytes, then %v", len(got), len(last), err)
	}
}

// Nor does the kernel wait for it: it would keep the rest, which nobody counts, for as
// long as the client takes a little now and then.
func TestCloseLetsGoOfWhoDoesNotRead(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(*hangups, *net.TCPConn) error{
		"stays":         func(h *hangups, _ *net.TCPConn) error { h.stall = moment; return nil },
		"ends its half": func(_ *hangups, c *net.TCPConn) error { return c.CloseWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h, l := listening(t)
			last := bytes.Repeat([]byte("last words "), 100_000)
			client, server := parting(t, l, last)
			if err := leave(h, client); err != nil {
				t.Fatal(err)
			}
			server.Close()
			wait.For(t, "the connection to be let go of", func() bool {
				h.mu.Lock()
				defer h.mu.Unlock()
				return len(h.conns) == 0
			})
			if got, err := io.ReadAll(client); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%d of %d bytes, then %v", len(got), len(last), err)
			}
		})
	}
}

// How long a client is waited for that takes a little now and then has a bound; one that
// is slow and no more is given everything.
func TestLingerIsBounded(t *testing.T) {
	t.Parallel()
	const size = 4 << 20
	for rate, patient := range map[int]bool{1: false, slowest / 2: false, slowest: true, 1 << 20: true} { // bytes a second
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			unsent := func() int { return max(0, size-rate*int(time.Since(began)/time.Second)) }
			said := make(chan struct{})
			close(said)
			awaitClient(unsent, stallTime, nil, said)
			if left, took := unsent(), time.Since(began); (left == 0) != patient || took > stallTime+size/slowest*time.Second {
				t.Errorf("%d bytes a second: left after %v, while %d bytes were to be sent", rate, took, left)
			}
		})
	}
}

// A client that has taken all so far is not left while there is more to say to it,
// such as the status of what has ended.
func TestCloseWaitsForPendingWrites(t *testing.T) {
	t.Parallel()
	_, l := listening(t)
	_, server := parting(t, l, nil)
	said, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		server.linger(server.gone, said)
	}()
	select {
	case <-over:
		t.Fatal("the client was left before all was said")
	case <-time.After(3 * moment):
	}
	close(said)
	wait.For(t, "the parting", func() bool {
		select {
		case <-over:
			return true
		default:
			return false
		}
	})
}

// listening is a listener on loopback with its hangups.
func listening(t *testing.T) (*hangups, watched) {
	t.Helper()
	return listeningFor(t, maxStrangers)
}

// listeningFor is one for as many connections without a ticket.
func listeningFor(t *testing.T, strangers int) (*hangups, watched) {
	t.Helper()
	h, err := newHangups(strangers)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.Close()
		h.abortAll()
		h.close()
	})
	return h, watched{l, h}
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
		client.SetDeadline(time.Now().Add(wait.Limit)), server.SetDeadline(time.Now().Add(wait.Limit)),
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
// do not count: of too many the oldest is closed.
func TestConnectionsWithoutATicketAreBounded(t *testing.T) {
	t.Parallel()
	h, l := listeningFor(t, 2)
	enter := func() *conn {
		t.Helper()
		client, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		accepted, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return accepted.(*conn)
	}
	closed := func(c *conn) bool {
		select {
		case <-c.closed:
			return true
		default:
			return false
		}
	}
	known := enter()
	known.introduce()
	known.introduce()
	first, second := enter(), enter()
	if closed(first) || closed(second) {
		t.Error("closed although there was room")
	}
	third := enter()
	if !closed(first) || closed(second) || closed(third) {
		t.Errorf("one too many: closed %t, %t, %t, want the oldest", closed(first), closed(second), closed(third))
	}
	third.abort()
	enter()
	if closed(second) || closed(known) {
		t.Error("closed although there was room again")
	}
	if n := h.strangers.Closed(); n != 1 {
		t.Errorf("%d are counted", n)
	}
}
