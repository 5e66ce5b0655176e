package oci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
)

// Size is that of a terminal, in characters.
type Size struct{ Width, Height uint16 }

// Session is our side of the standard streams of a process in a container: a
// command that Open has started, or the container's own that Attach has joined.
// It costs a few goroutines and its descriptors, and no thread.
type Session struct {
	stdin, stdout, stderr *os.File // nil: none; with a terminal the first two are one

	terminal bool
	ended    <-chan struct{} // the process is dead
	over     chan struct{}   // closed by Close
	closing  sync.Once

	status     unix.WaitStatus    // of it, once ended
	waitErr    error              // why there is no status
	attachment *conmon.Attachment // else nil
	resize     func(context.Context, Size) error
	endInput   func()        // how its input ends; nil: with our end of it
	kill       func()        // the process, where no pid serves
	quiet      time.Duration // of the output, once the process has ended, until no more is waited for
}

// Ended is closed when the process is dead.
func (s *Session) Ended() <-chan struct{} { return s.ended }

// ExitCode is that of a command which has ended: 128 and the signal where there
// was one, as shells have it.
func (s *Session) ExitCode() (int32, error) {
	if s.waitErr != nil {
		return 0, fmt.Errorf("wait for command: %w", s.waitErr)
	}
	if s.status.Signaled() {
		return 128 + int32(s.status.Signal()), nil
	}
	return int32(s.status.ExitStatus()), nil
}

// Input copies from r to the process until r ends, or Close. What the process
// does not want is thrown away.
func (s *Session) Input(r io.Reader) {
	if s.stdin != nil {
		_, _ = io.Copy(s.stdin, r)
	}
	_, _ = io.Copy(io.Discard, r)
}

// TakesInput reports whether there is an input that Input copies to.
func (s *Session) TakesInput() bool { return s.stdin != nil }

// Unread is how many bytes of its input the process has not read yet; of a
// terminal's input that cannot be seen, and is 0.
func (s *Session) Unread() int {
	if s.stdin == nil || s.terminal {
		return 0
	}
	raw, err := s.stdin.SyscallConn()
	if err != nil {
		return 0
	}
	var n uint32
	failed := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetUint32(int(fd), unix.TIOCINQ) })
	if failed != nil || err != nil {
		return 0
	}
	return int(n)
}

// EndInput lets the process read the end of its input. A terminal has none.
func (s *Session) EndInput() {
	switch {
	case s.stdin == nil || s.terminal:
	case s.endInput != nil:
		s.endInput()
	case s.attachment != nil:
		s.attachment.CloseStdin()
	default:
		_ = s.stdin.Close()
	}
}

// Resize sets the size of the terminal; without one it does nothing.
func (s *Session) Resize(ctx context.Context, size Size) error {
	if s.resize == nil {
		return nil
	}
	return s.resize(ctx, size)
}

// How long output is waited for once the process has ended, while a child of it
// keeps the streams open (containerd#7832). What the process itself has written
// is there by then and not lost.
const (
	quietTime = 100 * time.Millisecond // of silence
	drainTime = 2 * time.Second        // in all
)

// Output copies what the process writes until both streams are at their end, or
// the process at its own. A nil writer throws away. The error is that of a
// writer. A writer that does not take its bytes is waited for, whatever the
// process does.
func (s *Session) Output(ctx context.Context, stdout, stderr io.Writer) error {
	copied := make(chan error, 2)
	copying := func(dst io.Writer, src *os.File) {
		copied <- panics.Do(ctx, "copy output", func() error { return s.copy(dst, src) })
	}
	go copying(stdout, s.stdout)
	go copying(stderr, s.stderr)
	return errors.Join(<-copied, <-copied)
}

func (s *Session) silence() time.Duration { return cmp.Or(s.quiet, quietTime) }

// copy moves one stream.
func (s *Session) copy(dst io.Writer, src *os.File) error {
	if src == nil {
		return nil
	}
	if dst == nil {
		dst = io.Discard
	}
	done := make(chan struct{})
	defer close(done)
	limited := make(chan struct{})
	go func() {
		defer close(limited)
		select {
		case <-s.ended:
			_ = src.SetReadDeadline(time.Now().Add(s.silence()))
		case <-s.over:
		case <-done:
		}
	}()
	const most = 32 << 10
	buf := make([]byte, most/16) // a probe has little to say, and there are many probes
	var end time.Time
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return err
			}
		}
		if n == len(buf) && n < most {
			buf = make([]byte, most)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			<-limited
			return leftover(dst, src, buf)
		}
		if err != nil { // its end; that of a terminal is EIO
			return nil
		}
		select {
		case <-s.ended:
			now := time.Now()
			if end.IsZero() {
				end = now.Add(drainTime)
			}
			_ = src.SetReadDeadline(earlier(now.Add(s.silence()), end))
		default:
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// leftover moves what a pipe holds when its time is up: a deadline that passes
// while a slow writer is waited for must not cost a byte. Who goes on writing
// gets no further than one full pipe.
func leftover(dst io.Writer, src *os.File, buf []byte) error {
	const fullPipe = wire.MostBehind
	_ = src.SetReadDeadline(time.Time{})
	raw, err := src.SyscallConn()
	if err != nil {
		return nil //nolint:nilerr // closed
	}
	for moved := 0; moved < fullPipe; {
		n := 0
		closed := raw.Read(func(fd uintptr) bool {
			n, _ = unix.Read(int(fd), buf)
			return true
		})
		if closed != nil || n <= 0 {
			return nil //nolint:nilerr // all is read
		}
		moved += n
		if _, err := dst.Write(buf[:n]); err != nil {
			return err
		}
	}
	return nil
}

// Detach ends the output of an attachment after what the container has written
// until now. Where the monitor cannot do that the session is closed. The error is
// that of Dropped.
func (s *Session) Detach(ctx context.Context) error {
	err := s.attachment.Detach(ctx)
	if err != nil && !errors.Is(err, fault.Unavailable) {
		s.Close()
		return nil
	}
	return err
}

// Dropped is why the monitor has ended an attachment while the container ran:
// its output was not read, for instance.
func (s *Session) Dropped() error {
	if s.attachment == nil {
		return nil
	}
	return s.attachment.Dropped()
}

// Close lets go of the process: its terminal is hung up, its input ends, its
// output has no reader. Input and Output return.
func (s *Session) Close() {
	s.closing.Do(func() {
		close(s.over)
		if s.attachment != nil {
			s.attachment.Close()
		}
		for _, f := range []*os.File{s.stdin, s.stdout, s.stderr} {
			if f != nil {
				_ = f.Close()
			}
		}
	})
}

// stdio are the ends of pipes that become a process's standard descriptors.
type stdio [3]*os.File

func (c stdio) close() {
	for _, f := range c {
		if f != nil {
			_ = f.Close()
		}
	}
}

// open makes the pipes of a command. With a terminal they serve the runtime's
// own words only.
func (s *Session) open(c Command) (theirs stdio, err error) {
	if c.Stdin && !c.Terminal {
		if theirs[0], s.stdin, err = os.Pipe(); err != nil {
			return theirs, err
		}
	}
	if s.stdout, theirs[1], err = os.Pipe(); err != nil {
		return theirs, err
	}
	s.stderr, theirs[2], err = os.Pipe()
	return theirs, err
}

// lastWords is the end of what has been written to f, and of what is written
// within quietTime by whoever still has it.
func lastWords(f *os.File) string {
	last := capture.Tail{Max: maxDiagnosis}
	_ = f.SetReadDeadline(time.Now().Add(quietTime))
	_, _ = io.Copy(&last, f)
	_ = leftover(&last, f, make([]byte, 4096))
	return last.String()
}

// useTerminal turns the streams from the runtime's words to the terminal, if there is one.
func (s *Session) useTerminal(t terminal) error {
	master, err := t.master()
	if err != nil || master == nil {
		return err
	}
	_ = s.stdout.Close()
	_ = s.stderr.Close()
	s.terminal = true
	s.stdin, s.stdout, s.stderr = master, master, nil
	s.resize = func(_ context.Context, size Size) error {
		raw, err := master.SyscallConn()
		if err != nil {
			return nil //nolint:nilerr // hung up
		}
		failed := raw.Control(func(fd uintptr) {
			err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
		})
		return errors.Join(failed, err)
	}
	return nil
}

// watch waits for the end of a command, a child of this process, and buries it. A
// command may outlive its session; then so does its watch.
func (s *Session) watch(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true) // so that Go polls it; PIDFD_NONBLOCK is as of Linux 5.10
	}
	if err != nil {
		return fmt.Errorf("watch command: %w", err)
	}
	child := os.NewFile(uintptr(fd), "pidfd")
	raw, err := child.SyscallConn()
	if err != nil {
		_ = child.Close()
		return err
	}
	ended := make(chan struct{})
	s.ended = ended
	go func() {
		defer child.Close()
		defer close(ended)
		err := raw.Read(func(uintptr) bool {
			var got int
			got, s.waitErr = unix.Wait4(pid, &s.status, unix.WNOHANG, nil)
			return got != 0
		})
		if err != nil {
			s.waitErr = err
		}
	}()
	return nil
}

// Attach joins the container's streams at its monitor.
func (t *cliTask) Attach(ctx context.Context, wanted conmon.Streams) (*Session, error) {
	a, err := conmon.Attach(ctx, t.ref.Dir, wanted)
	if err != nil {
		return nil, err
	}
	s := &Session{
		stdin: a.Stdin, stdout: a.Stdout, stderr: a.Stderr,
		ended: t.client.Exited(), over: make(chan struct{}), attachment: a,
	}
	terminal, err := t.terminal()
	if err != nil {
		s.Close()
		return nil, err
	}
	if terminal {
		s.terminal = true
		s.resize = func(ctx context.Context, size Size) error { return t.client.Resize(ctx, size.Width, size.Height) }
	}
	return s, nil
}

// terminal reports whether the container's own process has one.
func (t *watched) terminal() (bool, error) {
	process, err := readProcess[struct{ Terminal bool }](t.ref.Dir)
	if err != nil {
		return false, err
	}
	return process.Terminal, nil
}
