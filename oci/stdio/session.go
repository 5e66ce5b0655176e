// Package stdio is the server's side of the standard streams of processes in
// containers: pipes and terminals for runtimes, sessions with running
// processes, and connections built from them.
package stdio

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/devnull"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/oci/proc"
)

// Size is the size of a terminal, in characters.
type Size struct{ Width, Height uint16 }

// Session is the server's side of the standard streams of a process in a
// container: a command, or the container's own process to which a client has
// attached. It costs a few goroutines and its descriptors, and no thread.
type Session struct {
	ends    Ends
	ended   chan struct{} // nil: Ends.Ended reports the end
	over    chan struct{} // closed by Close
	closing sync.Once

	held atomic.Bool
	pace pace

	watched bool
	status  unix.WaitStatus // of the process, once ended
	waitErr error           // why there is no status
}

// Ends are this server's ends of the streams of a session.
type Ends struct {
	Stdin, Stdout, Stderr *os.File // nil: none; with a terminal the first two are the same file
	Terminal              bool
	Ended                 <-chan struct{}                   // closed when the process is dead; nil: Watch or Finish report it
	Attachment            *conmon.Attachment                // nil: the process is a command
	Resize                func(context.Context, Size) error // of the terminal; nil: its size cannot be set
	EndInput              func()                            // ends the process's input once the server's end is closed; nil: closing suffices
}

// New returns a session, which owns ends until it is closed.
func New(ends Ends) *Session {
	s := &Session{ends: ends, over: make(chan struct{}), pace: newPace()}
	if ends.Ended == nil {
		s.ended = make(chan struct{})
		s.ends.Ended = s.ended
	}
	return s
}

// Open returns a session with new pipes, and the other ends of them, which the
// caller must close. Without stdin the input is a null device that no other
// process has. With a terminal, the pipes carry only the runtime's own
// messages.
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

// ExitCode returns the exit code of an ended command: 128 plus the signal if
// one killed it, as in shells.
func (s *Session) ExitCode() (int32, error) {
	if s.waitErr != nil {
		return 0, fmt.Errorf("wait for command: %w", s.waitErr)
	}
	if s.status.Signaled() {
		return 128 + int32(s.status.Signal()), nil
	}
	return int32(s.status.ExitStatus()), nil
}

// Input copies from r to the process until r ends or Close is called. It
// discards what the process does not read. The input of an attachment waits
// while the client is far behind with reading the output.
func (s *Session) Input(r io.Reader) {
	switch {
	case s.ends.Stdin == nil:
	case s.ends.Attachment != nil:
		_, _ = io.Copy(pacedInput{s}, r)
	default:
		_, _ = io.Copy(s.ends.Stdin, r)
	}
	_, _ = io.Copy(io.Discard, r)
}

// TakesInput reports whether Input has somewhere to copy to.
func (s *Session) TakesInput() bool { return s.ends.Stdin != nil }

// Unread returns how many bytes of its input the process has not read yet; 0
// for a terminal, where that is unknown.
func (s *Session) Unread() int {
	if s.ends.Terminal {
		return 0
	}
	return look(s.ends.Stdin, unread)
}

// EndInput makes the process see the end of its input. A terminal's input has
// no end.
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

// DrainTime is how long Output waits for more of a stream, or for its end, once its limit is
// closed: a descendant of a command may keep it open for ever (containerd#7832).
const DrainTime = 2 * time.Second

// drainMost is for how long after that Output copies what still comes: it may be the rest of
// much output that a shim passes on slowly, or of a descendant that never ends.
const drainMost = 10 * time.Second

// quietTime is how long a runtime that reports a failure may pause.
const quietTime = 100 * time.Millisecond

// Output copies each stream that has a writer to its end, which comes when all processes
// that have the stream open, descendants of the process included, have closed it or
// exited. Once limit is closed, Output ends when a stream has been silent for DrainTime, after
// drainMost in total, or with the deadline of ctx, whichever is earliest, and then copies what
// the pipes hold; Held reports whether a stream was still open. A stream without a writer is
// discarded until Close. The error is a writer's. Output waits for a slow writer, whatever the
// process does.
func (s *Session) Output(ctx context.Context, limit <-chan struct{}, stdout, stderr io.Writer) error {
	copied := [2]chan error{make(chan error, 1), make(chan error, 1)}
	copying := func(i int, dst io.Writer, src *os.File) {
		copied[i] <- panics.Do(ctx, "copy output", func() error { return s.copy(ctx, limit, dst, src) })
	}
	var errs [2]error
	go copying(0, cmp.Or(stdout, io.Discard), s.ends.Stdout)
	go copying(1, cmp.Or(stderr, io.Discard), s.ends.Stderr)
	for i, w := range [...]io.Writer{stdout, stderr} {
		if w != nil {
			errs[i] = <-copied[i]
		}
	}
	return errors.Join(errs[:]...)
}

// Held reports whether some process had the output still open when Output stopped
// waiting for its end.
func (s *Session) Held() bool { return s.held.Load() }

// copy copies one stream.
func (s *Session) copy(ctx context.Context, limit <-chan struct{}, dst io.Writer, src *os.File) error {
	if src == nil {
		return nil
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-limit:
			_ = src.SetReadDeadline(within(ctx, DrainTime))
		case <-s.over:
		case <-done:
		}
	}()
	var d drain
	const most = 32 << 10
	buf := make([]byte, most/16) // a probe prints little, and there are many probes
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return err
			}
			s.pace.took()
			d.moved = time.Now()
		}
		if n == len(buf) && n < most {
			buf = make([]byte, most)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if d.goesOn(ctx, src) {
				continue
			}
			held, err := leftover(dst, src, buf)
			if held {
				s.held.Store(true)
			}
			return err
		}
		if err != nil { // end of file; EIO from a terminal
			return nil
		}
	}
}

// drain is the copying of a stream once its limit is closed.
type drain struct {
	moved time.Time // when something was copied last
	last  time.Time // the end of the drain at the latest; zero: DrainTime is not over yet
}

// goesOn reports, at a deadline of src, whether more may be waited for, and sets the next one.
func (d *drain) goesOn(ctx context.Context, src *os.File) bool {
	if d.last.IsZero() {
		d.last = within(ctx, drainMost-DrainTime)
	}
	if look(src, unread) > 0 { // it came while this process did not run
		d.moved = time.Now()
	}
	end := earlier(d.moved.Add(DrainTime), d.last)
	if !time.Now().Before(end) {
		return false
	}
	_ = src.SetReadDeadline(end)
	return true
}

// within returns the end of a time that begins now, or the deadline of ctx if that is earlier.
func within(ctx context.Context, d time.Duration) time.Time {
	end := time.Now().Add(d)
	if deadline, ok := ctx.Deadline(); ok {
		return earlier(end, deadline)
	}
	return end
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// leftover copies what a pipe holds when its time is up: a deadline that passes
// during a slow write must not lose a byte. A process that continues to write
// gets no further than one full pipe. Held reports whether the pipe is still open.
func leftover(dst io.Writer, src *os.File, buf []byte) (held bool, err error) {
	const fullPipe = wire.MostBehind
	_ = src.SetReadDeadline(time.Time{})
	raw, err := src.SyscallConn()
	if err != nil {
		return false, nil //nolint:nilerr // closed
	}
	for moved := 0; moved < fullPipe; {
		n := 0
		var failed error
		closed := raw.Read(func(fd uintptr) bool {
			n, failed = unix.Read(int(fd), buf)
			return true
		})
		if closed != nil || n <= 0 {
			return errors.Is(failed, unix.EAGAIN), nil //nolint:nilerr // all is read
		}
		moved += n
		if _, err := dst.Write(buf[:n]); err != nil {
			return true, err
		}
	}
	return true, nil
}

// Detach ends the output of an attachment after what the container has written
// until now. If the monitor cannot do that Detach closes the session. The error
// is that of Dropped.
func (s *Session) Detach(ctx context.Context) error {
	err := s.ends.Attachment.Detach(ctx)
	if err != nil && !errors.Is(err, fault.Unavailable) {
		s.Close()
		return nil
	}
	return err
}

// Dropped returns why the monitor has ended an attachment while the container
// ran, for example because its output was not read.
func (s *Session) Dropped() error {
	if s.ends.Attachment == nil {
		return nil
	}
	return s.ends.Attachment.Dropped()
}

// Close releases the process: its terminal hangs up, its input ends, its output
// has no reader. Input and Output return.
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

// Give changes the owner of the pipes, because another user could not open them
// by names such as /dev/stdout.
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

// Close closes those that are not nil.
func (p Pipes) Close() {
	for _, f := range p {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Said returns what a runtime that failed to start a command has written to its
// standard error and to the terminal.
func (s *Session) Said(t Terminal) string { return outputTail(s.ends.Stderr) + "\n" + wordsOn(t) }

// outputTail returns the end of the output in f, or why the program got no threads, including what processes that
// still hold the pipe write within quietTime.
func outputTail(f *os.File) string {
	last := capture.Tail{Max: 4 << 10}
	_ = f.SetReadDeadline(time.Now().Add(quietTime))
	_, _ = io.Copy(&last, f)
	_, _ = leftover(&last, f, make([]byte, 4096))
	if words := inherit.WithoutRoom(last.Begin()); words != "" {
		return words
	}
	return last.String()
}

// UseTerminal switches the streams from the runtime's messages to the terminal,
// if there is one.
func (s *Session) UseTerminal(t Terminal) error {
	master, err := t.Master()
	if err != nil || master == nil {
		return err
	}
	_ = s.ends.Stdout.Close()
	_ = s.ends.Stderr.Close()
	s.ends.Terminal = true
	s.ends.Stdin, s.ends.Stdout, s.ends.Stderr = master, master, nil
	s.ends.Resize = func(_ context.Context, size Size) error { return setSize(master, size) }
	return nil
}

// Watch waits for the end of a command, a child of this process, and reaps it.
// It does nothing if a watch is already running. A command may outlive its
// session; then so does its watch.
func (s *Session) Watch(pid int) error {
	if s.watched {
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true) // so that Go polls it; PIDFD_NONBLOCK needs Linux 5.10
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
	reaped := proc.Claim(pid)
	go func() {
		defer child.Close()
		defer reaped()
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

// Finish reports the end of a command for which other code waits: its status,
// or why there is none.
func (s *Session) Finish(status unix.WaitStatus, err error) {
	s.status, s.waitErr = status, err
	close(s.ended)
}
