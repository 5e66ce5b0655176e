package conmon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// Streams names standard streams.
type Streams struct{ Stdin, Stdout, Stderr bool }

// Attachment is a client's connection to the standard streams of a container: a copy of
// its output from now on, and its input. A stream is nil if it was not requested; Stdin
// is also nil if the container has no input, or its input has ended.
//
// The container waits in its writes for a client that leaves much of a stream unread, but
// not for one that reads nothing for Spec.AttachWait: the output of that one ends. Stdin
// can be written to nevertheless.
type Attachment struct {
	Stdin, Stdout, Stderr *os.File

	conn *os.File
}

// Attach connects to standard streams of the container whose run directory is dir.
func Attach(ctx context.Context, dir string, wanted Streams) (*Attachment, error) {
	ctx, cancel := limitAnswer(ctx, dir)
	defer cancel()
	conn, err := connect(dir)
	if nobodyListens(err) {
		return nil, fmt.Errorf("attach: %w", absence())
	}
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	a := &Attachment{conn: conn}
	if err := a.ask(ctx, wanted); err != nil {
		a.Close()
		return nil, fmt.Errorf("attach: %w", err)
	}
	return a, nil
}

func (a *Attachment) ask(ctx context.Context, wanted Streams) (err error) {
	var names []string
	var theirs []int // ends of pipes
	defer func() {
		for _, fd := range theirs {
			_ = unix.Close(fd)
		}
	}()
	if wanted.Stdin {
		names = append(names, "stdin")
	}
	for _, out := range []struct {
		name   string
		wanted bool
		file   **os.File
	}{{"stdout", wanted.Stdout, &a.Stdout}, {"stderr", wanted.Stderr, &a.Stderr}} {
		if !out.wanted {
			continue
		}
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			return err
		}
		// The monitor may not be allowed to make such a large pipe, and grows the
		// received one as far as it may.
		_, _ = unix.FcntlInt(uintptr(p[0]), unix.F_SETPIPE_SZ, wire.MostBehind)
		*out.file = os.NewFile(uintptr(p[0]), out.name)
		names, theirs = append(names, out.name), append(theirs, p[1])
	}
	err = a.send(wire.Message{Verb: wire.Attach, Text: strings.Join(names, " ")}, theirs...)
	if err != nil && !hasLeft(err) { // it may have reported the reason before
		return err
	}
	answer, control, err := a.answer(ctx)
	switch {
	case err != nil:
		return err
	case answer.Verb == wire.Error:
		return fmt.Errorf("%s: %w", answer.Text, fault.Precondition)
	}
	return a.takeInput(control)
}

// send does not wait: a monitor that lets requests pile up hangs.
func (a *Attachment) send(m wire.Message, fds ...int) error {
	raw, err := a.conn.SyscallConn()
	if err != nil {
		return err
	}
	failed := raw.Control(func(fd uintptr) {
		err = unix.Sendmsg(int(fd), wire.Append(nil, m), unix.UnixRights(fds...), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
	return errors.Join(failed, err)
}

func hasLeft(err error) bool { return errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) }

// answer returns the answer to a request; it skips messages that the monitor
// sends to every client.
func (a *Attachment) answer(ctx context.Context) (m wire.Message, control []byte, err error) {
	defer context.AfterFunc(ctx, func() { _ = a.conn.SetReadDeadline(time.Unix(1, 0)) })()
	raw, err := a.conn.SyscallConn()
	if err != nil {
		return m, nil, err
	}
	for {
		var packet [wire.MaxPacket]byte
		var n, controlled int
		control = make([]byte, 64)
		waited := raw.Read(func(fd uintptr) bool {
			n, controlled, _, _, err = unix.Recvmsg(int(fd), packet[:], control, unix.MSG_CMSG_CLOEXEC)
			return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
		})
		switch { // accept an answer that has come in any case: it may bring a descriptor
		case errors.Is(err, unix.ECONNRESET): // the request was not read; the monitor's last message comes next
			continue
		case waited == nil && err == nil && n > 0:
		case ctx.Err() != nil:
			return m, nil, fmt.Errorf("the monitor does not answer: %w", context.Cause(ctx))
		default:
			return m, nil, absence()
		}
		switch m, _ = wire.Parse(packet[:n]); m.Verb {
		case wire.OK, wire.Error, wire.Dropped:
			return m, control[:controlled], nil
		}
	}
}

// takeInput finds the descriptor of the container's input in the control
// message.
func (a *Attachment) takeInput(control []byte) error {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) == 0 {
		return err
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return err
	}
	a.Stdin = os.NewFile(uintptr(fds[0]), "stdin")
	return nil
}

// CloseStdin closes this client's end of the container's standard input. The container
// reads the end of it once all other attached clients have closed theirs.
func (a *Attachment) CloseStdin() {
	if a.Stdin == nil {
		return
	}
	_ = a.Stdin.Close()
	_ = a.send(wire.Message{Verb: wire.CloseStdin})
}

// Detach ends the output: the client still receives what the container has
// written until now, unless the disk of its log is full, and then the end of
// each stream. The container's input stays open.
//
// An error of fault.Unavailable is that of Dropped, and the output ends as
// well. After any other error the output continues: the monitor hangs, or is of
// an earlier release (fault.Unimplemented).
func (a *Attachment) Detach(ctx context.Context) error {
	var answer wire.Message
	err := a.send(wire.Message{Verb: wire.Detach})
	if err == nil || hasLeft(err) { // it may have dropped this client before
		answer, _, err = a.answer(ctx)
	}
	switch {
	case errors.Is(err, fault.Precondition): // the output has ended with the monitor
		return nil
	case err != nil:
		return fmt.Errorf("detach: %w", err)
	case answer.Verb == wire.Error:
		return fmt.Errorf("detach: %s: %w", answer.Text, fault.Unimplemented)
	case answer.Verb == wire.Dropped:
		return dropped(answer)
	}
	return nil
}

// Close detaches. Nothing changes for the container, unless Spec.StdinOnce is set: then
// its standard input ends.
func (a *Attachment) Close() {
	for _, f := range []*os.File{a.Stdin, a.Stdout, a.Stderr, a.conn} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Dropped returns why the monitor disconnected this client while the container
// ran; nil if it did not. The monitor reports that once, so only the first call
// returns it.
func (a *Attachment) Dropped() (dropped error) {
	raw, err := a.conn.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) { dropped = droppedBy(int(fd)) })
	return dropped
}

// droppedBy reads the monitor's messages since the client attached.
func droppedBy(fd int) error {
	for {
		packet, err := next(fd)
		switch {
		case errors.Is(err, unix.ECONNRESET): // the monitor's last message comes next
			continue
		case errors.Is(err, io.EOF):
			return absence()
		case err != nil:
			return nil //nolint:nilerr // EAGAIN: it has not said anything more
		}
		switch m, _ := wire.Parse(packet); m.Verb {
		case wire.Dropped:
			return dropped(m)
		case wire.Exited:
			return nil
		}
	}
}

func dropped(m wire.Message) error {
	return fmt.Errorf("monitor disconnected this client: %s: %w", m.Text, fault.Unavailable)
}
