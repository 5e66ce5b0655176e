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

// Attachment is a share in the standard streams of a container: a copy of all
// it writes from now on, and its input. Each stream is nil if it was not asked
// for; Stdin also if the container has none, or none any more.
//
// Nobody waits for a client that does not read: one that leaves more than
// wire.MostBehind bytes of a stream unread is dropped, and its output ends.
type Attachment struct {
	Stdin, Stdout, Stderr *os.File

	conn *os.File
}

// Attach asks the monitor of dir for a share in its container's streams.
func Attach(ctx context.Context, dir string, wanted Streams) (*Attachment, error) {
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
		*out.file = os.NewFile(uintptr(p[0]), out.name)
		names, theirs = append(names, out.name), append(theirs, p[1])
	}
	packet := wire.Append(nil, wire.Message{Verb: wire.Attach, Text: strings.Join(names, " ")})
	raw, err := a.conn.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	if err := raw.Control(func(fd uintptr) {
		sent = unix.Sendmsg(int(fd), packet, unix.UnixRights(theirs...), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}); err != nil {
		return err
	}
	gone := errors.Is(sent, unix.EPIPE) || errors.Is(sent, unix.ECONNRESET) // and has perhaps said why
	if sent != nil && !gone {
		return sent
	}
	defer context.AfterFunc(ctx, func() { _ = a.conn.SetReadDeadline(time.Unix(1, 0)) })()
	return a.answer(ctx)
}

// answer passes over what the monitor tells every client.
func (a *Attachment) answer(ctx context.Context) error {
	raw, err := a.conn.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var packet [wire.MaxPacket]byte
		var control [64]byte
		var n, controlled int
		waited := raw.Read(func(fd uintptr) bool {
			n, controlled, _, _, err = unix.Recvmsg(int(fd), packet[:], control[:], unix.MSG_CMSG_CLOEXEC)
			return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
		})
		switch { // an answer that has come is taken in any case: it may bring a descriptor
		case errors.Is(err, unix.ECONNRESET): // our request was not read; what it said comes next
			continue
		case waited == nil && err == nil && n > 0:
		case ctx.Err() != nil:
			return fmt.Errorf("the monitor does not answer: %w", context.Cause(ctx))
		default:
			return absence()
		}
		m, _ := wire.Parse(packet[:n])
		switch m.Verb {
		case wire.OK:
			return a.takeInput(control[:controlled])
		case wire.Error:
			return fmt.Errorf("%s: %w", m.Text, fault.Precondition)
		}
	}
}

// takeInput finds the descriptor that the container's input was lent by.
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

// CloseStdin lets the container read the end of its standard input, once the
// others who have attached to it have let go of it.
func (a *Attachment) CloseStdin() {
	if a.Stdin == nil {
		return
	}
	_ = a.Stdin.Close()
	raw, err := a.conn.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.Send(int(fd), wire.Append(nil, wire.Message{Verb: wire.CloseStdin}), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
}

// Close detaches. The container notices nothing, unless its standard input was
// to be used once: then that ends.
func (a *Attachment) Close() {
	for _, f := range []*os.File{a.Stdin, a.Stdout, a.Stderr, a.conn} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Dropped is why the monitor has ended the attachment while the container ran;
// nil: it has not. The monitor says so once, and so does Dropped.
func (a *Attachment) Dropped() (dropped error) {
	raw, err := a.conn.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) { dropped = droppedBy(int(fd)) })
	return dropped
}

// droppedBy reads what the monitor has told since the client attached.
func droppedBy(fd int) error {
	for {
		packet, err := next(fd)
		switch {
		case errors.Is(err, unix.ECONNRESET): // what the monitor has said before comes next
			continue
		case errors.Is(err, io.EOF):
			return absence()
		case err != nil:
			return nil //nolint:nilerr // EAGAIN: it has not said anything more
		}
		switch m, _ := wire.Parse(packet); m.Verb {
		case wire.Dropped:
			return fmt.Errorf("the container's monitor has dropped this client: %s: %w", m.Text, fault.Unavailable)
		case wire.Exited:
			return nil
		}
	}
}
