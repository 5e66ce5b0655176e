// Package stdio is this server's side of the standard streams of processes in
// containers: pipes and terminals that runtimes get, sessions with processes that run,
// and connections made of them.
package stdio

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
	"github.com/crius-run/crius/internal/devnull"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
)

// Size is that of a terminal, in characters.
type Size struct{ Width, Height uint16 }

// Session is our side of the standard streams of a process in a container: a
// command, or the container's own process that somebody has attached to. It costs a
// few goroutines and its descriptors, and no thread.
type Session struct {
	ends    Ends
	ended   chan struct{} // nil: another one tells
	over    chan struct{} // closed by Close
	closing sync.Once

	watched bool
	status  unix.WaitStatus // of the process, once ended
	waitErr error           // why there is no status
}

// Ends are this server's ends of the streams of a session.
type Ends struct {
	Stdin, Stdout, Stderr *os.File // nil: none; with a terminal the first two are one
	Terminal              bool
	Ended                 <-chan struct{}                   // closed when the process is dead; nil: Watch or Finish tell
	Attachment            *conmon.Attachment                // nil: the process is a command
	Resize                func(context.Context, Size) error // of the terminal; nil: it has no size to set
	EndInput              func()                            // how its input ends, once our end is closed; nil: by that alone
	Quiet                 time.Duration                     // of the output, once the process has ended, until no more is waited for
}

// New makes a session, which has the ends until it is closed.
func New(ends Ends) *Session {
	s := &Session{ends: ends, over: make(chan struct{})}
	if ends.Ended == nil {
		s.ended = make(chan struct{})
		s.ends.Ended = s.ended
	}
	return s
}

// Open makes a session of new pipes, and returns the other ends of them, which are the
// caller's: of the input only with stdin, else a null device, which no other process has
// either. With a terminal, pipes serve the runtime's own words only.
func Open(stdin bool) (*Session, Pipes, error) {
	var ours, theirs Pipes
	open := func(i int) (err error) {
		if i == 0 && !stdin {
			theirs[0], err = devnull.Open()
			return err
		}
		r, w, err := os.Pipe()
		if i == 0 {
			r, w = w, r
		}
		ours[i], theirs[i] = r, w
		return err
	}
	for i := range theirs {
		if err := open(i); err != nil {
			ours.Close()
			theirs.Close()
			return nil, Pipes{}, err
		}
	}
	return New(Ends{Stdin: ours[0], Stdout: ours[1], Stderr: ours[2]}), theirs, nil
}

// Ended is closed when the process is dead.
func (s *Session) Ended() <-chan struct{} { return s.ends.Ended }

// Closed is closed by Close.
func (s *Session) Closed() <-chan struct{} { return s.over }

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
	if s.ends.Stdin != nil {
		_, _ = io.Copy(s.ends.Stdin, r)
	}
	_, _ = io.Copy(io.Discard, r)
}

// TakesInput reports whether there is an input that Input copies to.
func (s *Session) TakesInput() bool { return s.ends.Stdin != nil }

// Unread is how many bytes of its input the process has not read yet; of a
// terminal's input that cannot be seen, and is 0.
func (s *Session) Unread() int {
	if s.ends.Stdin == nil || s.ends.Terminal {
		return 0
	}
	raw, err := s.ends.Stdin.SyscallConn()
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
	case s.ends.Stdin == nil || s.ends.Terminal:
	case s.ends.Attachment != nil:
		s.ends.Attachment.CloseStdin()
	default:
		_ = s.ends.Stdin.Close()
		if s.ends.EndInput != nil {
			s.ends.EndInput()
		}
	}
}

// Resize sets the size of the terminal; without one it does nothing.
func (s *Session) Resize(ctx context.Context, size Size) error {
	if s.ends.Resize == nil {
		return nil
	}
	return s.ends.Resize(ctx, size)
}

// How long output is waited for once the process has ended, while a child of it
// keeps the streams open (containerd#7832). What the process itself has written
// is there by then and not lost.
const (
	quietTime = 100 * time.Millisecond // of silence
	// DrainTime is that in all.
	DrainTime = 2 * time.Second
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
	go copying(stdout, s.ends.Stdout)
	go copying(stderr, s.ends.Stderr)
	return errors.Join(<-copied, <-copied)
}

func (s *Session) silence() time.Duration { return cmp.Or(s.ends.Quiet, quietTime) }

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
		case <-s.ends.Ended:
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
		case <-s.ends.Ended:
			now := time.Now()
			if end.IsZero() {
				end = now.Add(DrainTime)
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
	err := s.ends.Attachment.Detach(ctx)
	if err != nil && !errors.Is(err, fault.Unavailable) {
		s.Close()
		return nil
	}
	return err
}

// Dropped is why the monitor has ended an attachment while the container ran:
// its output was not read, for instance.
func (s *Session) Dropped() error {
	if s.ends.Attachment == nil {
		return nil
	}
	return s.ends.Attachment.Dropped()
}

// Close lets go of the process: its terminal is hung up, its input ends, its
// output has no reader. Input and Output return.
func (s *Session) Close() {
	s.closing.Do(func() {
		close(s.over)
		if s.ends.Attachment != nil {
			s.ends.Attachment.Close()
		}
		Pipes{s.ends.Stdin, s.ends.Stdout, s.ends.Stderr}.Close()
	})
}

// Pipes are ends of pipes that become a process's standard descriptors.
type Pipes [3]*os.File

// Give makes somebody the owner of those that are pipes, who else could not open them by
// names such as /dev/stdout.
func (p Pipes) Give(uid, gid uint32) error {
	for _, f := range p {
		st, err := f.Stat()
		if err == nil && st.Mode()&os.ModeNamedPipe != 0 {
			err = f.Chown(int(uid), int(gid))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Close closes those that are there.
func (p Pipes) Close() {
	for _, f := range p {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Said is what a runtime that failed to start a command has written, to its standard
// error and to the terminal.
func (s *Session) Said(t Terminal) string { return lastWords(s.ends.Stderr) + "\n" + wordsOn(t) }

// lastWords is the end of what has been written to f, and of what is written
// within quietTime by whoever still has it.
func lastWords(f *os.File) string {
	last := capture.Tail{Max: 4 << 10}
	_ = f.SetReadDeadline(time.Now().Add(quietTime))
	_, _ = io.Copy(&last, f)
	_ = leftover(&last, f, make([]byte, 4096))
	return last.String()
}

// UseTerminal turns the streams from the runtime's words to the terminal, if there is one.
func (s *Session) UseTerminal(t Terminal) error {
	master, err := t.Master()
	if err != nil || master == nil {
		return err
	}
	_ = s.ends.Stdout.Close()
	_ = s.ends.Stderr.Close()
	s.ends.Terminal = true
	s.ends.Stdin, s.ends.Stdout, s.ends.Stderr = master, master, nil
	s.ends.Resize = func(_ context.Context, size Size) error {
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

// Watch waits for the end of a command, a child of this process, and reaps it, unless
// it does so already. A command may outlive its session; then so does its watch.
func (s *Session) Watch(pid int) error {
	if s.watched {
		return nil
	}
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
	s.watched = true
	go func() {
		defer child.Close()
		var status unix.WaitStatus
		var failed error
		err := raw.Read(func(uintptr) bool {
			var got int
			got, failed = unix.Wait4(pid, &status, unix.WNOHANG, nil)
			return got != 0
		})
		s.Finish(status, cmp.Or(err, failed))
	}()
	return nil
}

// Finish tells the end of a command that somebody else waits for: its status, or why
// there is none.
func (s *Session) Finish(status unix.WaitStatus, err error) {
	s.status, s.waitErr = status, err
	close(s.ended)
}
