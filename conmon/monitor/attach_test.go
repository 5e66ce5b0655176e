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
