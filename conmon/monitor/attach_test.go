package monitor

import (
	"bytes"
	"errors"
	"syscall"
	"testing"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/test/kit/wait"
)

// TestShareNeverWaits: a pipe that nobody reads takes MostBehind bytes, and then
// its client is too slow at once.
func TestShareNeverWaits(t *testing.T) {
	t.Parallel()
	var slow []int
	s := stream{tooSlow: func(client int) { slow = append(slow, client) }}
	for i := range s.taps {
		s.taps[i] = -1
	}
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	s.taps[3], s.tapped = p[1], 1 // share closes it; closed twice, it would be a descriptor of a test beside this one
	chunk := bytes.Repeat([]byte("x"), bufferSize)
	for range wire.MostBehind/len(chunk) + 1 {
		if s.share(chunk); len(slow) > 0 {
			break
		}
	}
	if len(slow) != 1 || slow[0] != 3 {
		t.Fatalf("too slow: %v, want client 3", slow)
	}
	size := capacity(p[1])
	if size != wire.MostBehind && !errors.Is(growPipe(p[1], 2*size), syscall.EPERM) {
		t.Errorf("too slow after %d bytes, and the pipe could grow", size)
	}
	if got := unread(p[0]); got != size {
		t.Errorf("the pipe holds %d bytes, want %d", got, size)
	}
	syscall.Close(p[0])
	wait.For(t, "a pipe without a reader to be given up", func() bool { // until its exec, a child of a parallel test has it too
		before := len(slow)
		s.share(chunk)
		return s.tapped == 0 && len(slow) == before
	})
}

// What the container has written before a client detaches reaches it, though no
// event has told of it yet, and then its output ends: that of no other client.
func TestDetachPassesOnWhatWasWritten(t *testing.T) {
	t.Parallel()
	m := newMonitor(wire.Options{}, nil)
	var container [2]int
	if err := syscall.Pipe2(container[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	_ = growPipe(container[0], pipeSize)
	defer syscall.Close(container[1])
	m.stdout.fd = container[0]
	defer m.stdout.close()
	var clients [2]int
	for i := range clients {
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(p[0])
		m.stdout.tap(i, p[1])
		clients[i] = p[0]
	}
	text := bytes.Repeat([]byte("0123456789abcdef"), capacity(container[0])/16) // a full pipe
	if n, err := syscall.Write(container[1], text); n != len(text) {
		t.Fatalf("%d bytes, %v", n, err)
	}
	m.stdout.detachAfter(&m.log, 0)
	for i, fd := range clients {
		got := make([]byte, len(text))
		n, err := syscall.Read(fd, got)
		if !bytes.Equal(got[:max(n, 0)], text) {
			t.Errorf("client %d gets %d bytes, want %d: %v", i, n, len(text), err)
		}
	}
	if n, err := syscall.Read(clients[1], make([]byte, 1)); n != -1 || !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("the output of the client that stays goes on with %d, %v", n, err)
	}
	wait.For(t, "the client's output to end", func() bool { // until its exec, a child of a parallel test has it too
		n, err := syscall.Read(clients[0], make([]byte, 1))
		return n == 0 && err == nil
	})
}

// The container is not read while a client leaves too much unread. A client that reads is
// waited for as long as it takes; one that does not loses its patience. A dead container is
// read to its end, for which the pipe has room.
func TestContainerWaitsForLaggards(t *testing.T) {
	t.Parallel()
	m := newMonitor(wire.Options{AttachWait: 1000}, nil)
	var slow []int
	m.stdout.tooSlow = func(client int) { slow = append(slow, client) }
	var container, p [2]int
	for _, pipe := range []*[2]int{&container, &p} {
		if err := syscall.Pipe2(pipe[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
	}
	_ = growPipe(container[0], pipeSize)
	defer syscall.Close(container[1])
	defer syscall.Close(p[0])
	m.stdout.fd = container[0]
	defer m.stdout.close()
	m.stdout.tap(5, p[1])
	// Pieces of which a page of a pipe can have one only.
	piece := bytes.Repeat([]byte("0123456789abcde\n"), 2064/16)
	fill := func() {
		for {
			if _, err := syscall.Write(container[1], piece); err != nil {
				return
			}
			m.stdout.ready = true
			m.stdout.pump(&m.log, bufferSize)
			if m.stdout.pause > 0 {
				return
			}
		}
	}
	for fill(); ; fill() {
		if n, err := syscall.Write(container[1], piece); n < 0 && errors.Is(err, syscall.EAGAIN) {
			break // the pipe of the container is full
		}
	}
	if behind := unread(p[0]); m.stdout.pause == 0 || behind < 128<<10 || m.stdout.readable() {
		t.Fatalf("pause %d, with %d bytes unread", m.stdout.pause, behind)
	}
	for range 10 { // a client that reads a little now and then
		m.stdout.lags(5, 900)
		if _, err := syscall.Read(p[0], make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if !m.stdout.lags(5, 900) || len(slow) > 0 {
			t.Fatal("a client that reads is not waited for")
		}
	}
	if !m.stdout.lags(5, 900) || len(slow) > 0 || m.stdout.lags(5, 100) || len(slow) != 1 || slow[0] != 5 {
		t.Errorf("a client that reads nothing: %v", slow)
	}
	before, left := unread(p[0]), unread(container[0])
	m.stdout.last = true
	for m.stdout.ready = true; m.stdout.ready; {
		m.stdout.pump(&m.log, turn)
	}
	if len(slow) != 1 || unread(p[0]) != before+left {
		t.Errorf("too slow %v; %d bytes of a dead container after %d, want %d more", slow, unread(p[0]), before, left)
	}
}
