package stdio

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// The monitor does not wait for long for attached clients: one that leaves much of the
// output unread, and reads nothing for a while, loses the rest (conmon.Spec.AttachWait). A
// client that sends faster than it reads the container's answers would fall behind by
// itself. So its input waits while it is far behind, but not for ever: a client may read
// nothing until it has sent everything.
const (
	// farBehind is how much of a stream may be unread before the input waits. The container
	// and the pipes on the way hold about half a MiB more.
	farBehind = 256 << 10
	// freeInput is how much input is passed on nevertheless. A person types less, to
	// interrupt a program that floods the terminal for instance.
	freeInput = 64 << 10
	// stallTime is how long the input waits while the client reads nothing.
	stallTime = 30 * time.Second
)

// pace holds back input. Its methods are for the one goroutine that copies the input,
// except took.
type pace struct {
	moved   chan struct{} // has an item after the client has taken output
	free    int           // of freeInput, used up
	stalled bool          // the client has taken nothing for stallTime, and is not waited for
}

func newPace() pace { return pace{moved: make(chan struct{}, 1)} }

// took notes that the client has taken output.
func (p *pace) took() {
	select {
	case p.moved <- struct{}{}:
	default:
	}
}

// wait returns when n bytes of input may be passed on. Behind says how much output is
// unread; over ends the wait.
func (p *pace) wait(n int, behind func() int, over ...<-chan struct{}) {
	for {
		if behind() < farBehind {
			p.free, p.stalled = 0, false
			return
		}
		if p.stalled {
			select {
			case <-p.moved: // it has only paused
				p.stalled = false
			default:
				return
			}
		}
		if p.free+n <= freeInput {
			p.free += n
			return
		}
		stall := time.NewTimer(stallTime)
		select {
		case <-p.moved:
		case <-stall.C:
			p.stalled = true
		case <-over[0]:
			stall.Stop()
			return
		case <-over[1]:
			stall.Stop()
			return
		}
		stall.Stop()
	}
}

// pacedInput is the input of an attachment.
type pacedInput struct{ s *Session }

func (p pacedInput) Write(b []byte) (int, error) {
	p.s.pace.wait(len(b), p.s.behind, p.s.over, p.s.ends.Ended)
	return p.s.ends.Stdin.Write(b)
}

// behind is how much of the output the client has not taken, of the stream of which that
// is more. A stream whose output has ended cannot fall behind any more.
func (s *Session) behind() int {
	most := 0
	for _, f := range [...]*os.File{s.ends.Stdout, s.ends.Stderr} {
		most = max(most, look(f, func(fd uintptr) int {
			hungUp := []unix.PollFd{{Fd: int32(fd)}}
			if n, err := unix.Poll(hungUp, 0); n > 0 || err != nil {
				return 0
			}
			return unread(fd)
		}))
	}
	return most
}

// unread is how many bytes a pipe holds.
func unread(pipe uintptr) int {
	n, err := unix.IoctlGetUint32(int(pipe), unix.TIOCINQ)
	if err != nil {
		return 0
	}
	return int(n)
}

// look calls f with the descriptor of a file that is there and open, else the result is 0.
func look(file *os.File, f func(fd uintptr) int) (n int) {
	if file == nil {
		return 0
	}
	if raw, err := file.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { n = f(fd) })
	}
	return n
}
