// Package session connects clients with processes in containers and with ports of pods: it
// copies bytes, decides when a session is over, and does not let a client that does not read
// hold up anything.
package session

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/oci/stdio"
)

// Client is the client of a session, as streams. The context that comes with it ends when the
// client has gone; its methods return then.
type Client struct {
	Stdin          io.ReadCloser     // nil: nothing will come. Close makes a Read under way return.
	Stdout, Stderr io.Writer         // nil: not wanted
	Resize         <-chan stdio.Size // nil: never
	Size           stdio.Size        // of the terminal when the session began; zero: unknown
	// Hangup ends the connection to a client that does not read: the reads and
	// writes under way return.
	Hangup func()
}

// drainTime is how long a client may leave the last output of an ended container unread: a
// client that does not read must not keep its session (cri-o#6699). A client that reads, however
// slowly, gets everything there is, which is no more than pipes hold. Nothing but the session
// waits for it.
const drainTime = 30 * time.Second

// inputTime is how long a container may leave a client's input unread, once that has ended.
const inputTime = 2 * time.Second

// quietTime is how long a container that has read all of a client's input may take until its
// next output before it counts as answered.
const quietTime = time.Second

// Process is the other side of a session; *stdio.Session implements it.
type Process interface {
	// Input copies r to the process; it returns at the end of r, or when the process
	// takes no more.
	Input(r io.Reader)
	// EndInput tells the process that no more input comes. TakesInput reports whether anything
	// could read it, Unread how many bytes have not been read.
	EndInput()
	TakesInput() bool
	Unread() int
	// Output copies each stream that has a writer until it ends, limit is closed and some
	// time has passed, or the session is closed.
	Output(ctx context.Context, limit <-chan struct{}, stdout, stderr io.Writer) error
	// Dropped returns fault.Unavailable if output was lost. Detach ends the output after what
	// has been written so far.
	Dropped() error
	Detach(ctx context.Context) error
	Resize(ctx context.Context, size stdio.Size) error
	// Ended is closed when the process has ended.
	Ended() <-chan struct{}
	Close()
}

// FirstSize waits a short time for the first size of a client's terminal, which clients
// send at once, so that a command finds it when it starts (kubernetes#47990). It returns
// zero if none comes.
func FirstSize(ctx context.Context, client Client) stdio.Size {
	if client.Resize == nil {
		return stdio.Size{}
	}
	limit := time.NewTimer(sizeTime)
	defer limit.Stop()
	select {
	case size := <-client.Resize:
		return size
	case <-ctx.Done():
	case <-limit.C:
	}
	return stdio.Size{}
}

// sizeTime is enough for the round trips that opening a stream takes.
const sizeTime = 500 * time.Millisecond

// Exec connects a client with a command until the command has exited and its output has
// ended: descendants that keep open what the client reads keep the session. Exited is
// closed when the command's container ends. Exec closes the process in the end.
func Exec(ctx context.Context, p Process, client Client, exited <-chan struct{}) error {
	s := session{process: p, client: client, exited: exited, endInput: p.EndInput, command: true}
	return s.copy(ctx)
}

// Attach connects a client with the standard streams of a container until one of the two ends.
// Exited is closed when the container ends. Attach closes the process in the end.
//
// The container waits for a client that reads slowly. One that reads nothing for a while (see
// conmon.Attachment) loses output, and its session ends with an error: at once if it has a
// terminal or no input, otherwise when all of its input has been passed on.
func Attach(ctx context.Context, p Process, client Client, exited <-chan struct{}, input Input) error {
	s := session{process: p, client: client, exited: exited, endInput: func() {}}
	s.entire = client.Stdin != nil && !input.Terminal
	if input.Once {
		s.endInput = p.EndInput
	} else {
		s.leaves = p.TakesInput()
	}
	return s.copy(ctx)
}

// Input describes the standard input of a container.
type Input struct {
	// Once: the end of the client's input ends the container's, and the client stays until
	// the container ends; otherwise the input stays open and the session ends.
	Once     bool
	Terminal bool
}

// session connects a client with a process.
type session struct {
	process  Process
	client   Client
	exited   <-chan struct{}
	endInput func() // when the client's input has ended
	command  bool   // the session ends with the process, and not before
	leaves   bool   // the session ends with the client's input
	entire   bool   // all of the client's input is passed on, whatever becomes of the output

	taken atomic.Uint64 // how often the client has taken output
}

// counted is the client's end of a stream of output.
type counted struct {
	io.Writer
	taken *atomic.Uint64
}

func (c counted) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	c.taken.Add(1)
	return n, err
}

// count returns w with its writes counted; nil if it is not wanted.
func (s *session) count(w io.Writer) io.Writer {
	if w == nil {
		return nil
	}
	return counted{w, &s.taken}
}

// copy copies bytes until the session is over, and closes the process.
func (s *session) copy(ctx context.Context) error {
	var group panics.Group
	defer group.Wait()
	defer s.process.Close()
	over := make(chan struct{})
	defer close(over)

	inputEnded, answered := make(chan struct{}), make(chan struct{})
	if s.client.Stdin != nil {
		defer s.client.Stdin.Close()
		group.Go(func() {
			s.process.Input(s.client.Stdin)
			s.endInput()
			close(inputEnded)
			if s.leaves {
				s.awaitAnswer(s.process.Unread, over, answered)
			}
		})
	}
	group.Go(func() { s.resize(ctx, over) })
	unread := make(chan struct{})
	group.Go(func() { s.awaitDrain(over, answered, unread) })
	copied := make(chan error, 1)
	group.Go(func() {
		copied <- s.process.Output(ctx, s.exited, s.count(s.client.Stdout), s.count(s.client.Stderr))
	})

	wantsOutput := s.client.Stdout != nil || s.client.Stderr != nil
	if wantsOutput {
		err := s.awaitOutput(ctx, copied, answered, unread)
		if errors.Is(err, fault.Unavailable) && s.entire {
			select {
			case <-inputEnded:
			case <-s.process.Ended():
			case <-ctx.Done():
			}
		}
		if err != nil || !s.command {
			return err
		}
	}
	var inputOver <-chan struct{} // for a client that wants no output
	if !s.command {
		inputOver = inputEnded
	}
	select {
	case <-s.process.Ended():
	case <-inputOver:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// awaitOutput waits for the end of the output, and ends it once the client may leave.
func (s *session) awaitOutput(ctx context.Context, copied <-chan error, answered, unread <-chan struct{}) (err error) {
	select {
	case err = <-copied:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-answered:
		return s.detach(ctx, copied, unread)
	case <-unread:
		s.client.Hangup()
		err = <-copied
	}
	if err == nil {
		err = s.process.Dropped()
	}
	return err
}

// detach ends the session after the last output of the container.
func (s *session) detach(ctx context.Context, copied <-chan error, unread <-chan struct{}) error {
	limited, cancel := context.WithTimeout(ctx, inputTime)
	defer cancel()
	dropped := s.process.Detach(limited)
	select {
	case err := <-copied:
		return errors.Join(err, dropped)
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-unread:
		s.client.Hangup()
		return <-copied
	}
}

// awaitAnswer closes answered when the container has answered the client's input, which has
// ended: the container has read all of it and then written nothing for quietTime. It does not
// wait longer than inputTime after the last read, even if the container writes all the time.
// Unread input of other clients counts as well. The time is counted in ticks, since a machine
// that stands still for a while gets only one of them.
func (s *session) awaitAnswer(unread func() int, over <-chan struct{}, answered chan<- struct{}) {
	const period = quietTime / 10
	tick := time.NewTicker(period)
	defer tick.Stop()
	least, taken := unread(), s.taken.Load()
	for sinceRead, sinceMoved := 0, 0; ; {
		select {
		case <-tick.C:
		case <-over:
			return
		}
		sinceRead, sinceMoved = sinceRead+1, sinceMoved+1
		if n := unread(); n < least {
			least, sinceRead, sinceMoved = n, 0, 0
		}
		if n := s.taken.Load(); n != taken {
			taken, sinceMoved = n, 0
		}
		if sinceRead >= int(inputTime/period) || least == 0 && sinceMoved >= int(quietTime/period) {
			close(answered)
			return
		}
	}
}

// resize gives the terminal the size of the client's.
func (s *session) resize(ctx context.Context, over <-chan struct{}) {
	if s.client.Size != (stdio.Size{}) { // for a runtime that has not set it
		_ = s.process.Resize(ctx, s.client.Size)
	}
	for {
		select {
		case size, more := <-s.client.Resize:
			if !more {
				return
			}
			_ = s.process.Resize(ctx, size) // there may be no terminal, or the process may be gone
		case <-over:
			return
		}
	}
}

// awaitDrain closes unread when the container has ended, or the client may leave, and the
// client has read nothing for some time after that.
func (s *session) awaitDrain(over, answered <-chan struct{}, unread chan<- struct{}) {
	select {
	case <-s.exited:
	case <-answered:
	case <-over:
		return
	}
	const ticks = 4 // see awaitAnswer
	tick := time.NewTicker(drainTime / ticks)
	defer tick.Stop()
	taken := s.taken.Load()
	for left := ticks; left > 0; left-- {
		select {
		case <-tick.C:
		case <-over:
			return
		}
		if n := s.taken.Load(); n != taken {
			taken, left = n, ticks+1
		}
	}
	close(unread)
}
