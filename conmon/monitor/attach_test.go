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
