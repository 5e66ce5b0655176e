package stdio

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/unixsocket"
)

// Terminal is a source of a command's terminal.
type Terminal interface {
	// Offer returns what a runtime gets for the terminal, besides or instead of
	// the command's pipes.
	Offer(pipes Pipes) (flags []string, streams Pipes)
	// Master returns the server's end, once the runtime has started the command
	// or failed to; nil: there is no terminal. The caller must close it.
	Master() (*os.File, error)
	// Close closes what the terminal itself does not need.
	Close()
}

// wordsOn returns what a failed runtime has written to the terminal, as crun
// does once it has made one.
func wordsOn(t Terminal) string {
	master, err := t.Master()
	if err != nil || master == nil {
		return ""
	}
	defer master.Close()
	colours := regexp.MustCompile("\x1b\\[[0-9;]*m|\r")
	return colours.ReplaceAllString(outputTail(master), "")
}

// NoTerminal is for a command without a terminal.
var NoTerminal Terminal = noTerminal{}

type noTerminal struct{}

func (noTerminal) Offer(pipes Pipes) ([]string, Pipes) { return nil, pipes }
func (noTerminal) Master() (*os.File, error)           { return nil, nil } //nolint:nilnil // see Terminal
func (noTerminal) Close()                              {}

type pty struct{ own, theirs *os.File }

// NewPTY makes a terminal of the server with the given size.
func NewPTY(size Size) (Terminal, error) {
	own, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("make terminal: %w", err)
	}
	theirs, err := otherEnd(own)
	if err == nil {
		err = setSize(own, size)
	}
	if err != nil {
		_ = own.Close()
		return nil, fmt.Errorf("make terminal: %w", err)
	}
	return &pty{own, theirs}, nil
}

func otherEnd(master *os.File) (*os.File, error) {
	raw, err := master.SyscallConn()
	if err != nil {
		return nil, err
	}
	var number uint32
	failed := raw.Control(func(fd uintptr) {
		if err = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); err == nil {
			number, err = unix.IoctlGetUint32(int(fd), unix.TIOCGPTN)
		}
	})
	if err := errors.Join(failed, err); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("/dev/pts/%d", number)
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0) // and blocking, unlike os.OpenFile
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

func setSize(terminal *os.File, size Size) error {
	raw, err := terminal.SyscallConn()
	if err != nil {
		return nil //nolint:nilerr // hung up
	}
	failed := raw.Control(func(fd uintptr) {
		err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
	})
	return errors.Join(failed, err)
}

func (p *pty) Offer(Pipes) ([]string, Pipes) { return nil, Pipes{p.theirs, p.theirs, p.theirs} }

func (p *pty) Master() (*os.File, error) {
	_ = p.theirs.Close() // otherwise its end would go unnoticed
	own := p.own
	p.own = nil
	return own, nil
}

func (p *pty) Close() {
	_ = p.theirs.Close()
	if p.own != nil {
		_ = p.own.Close()
	}
}

// Console is a socket to which a runtime connects: to hand over the master of a new
// terminal, or to forward a port.
type Console struct {
	Path string

	listener *net.UnixListener
}

// NewConsole listens in dir, under a name short enough for a socket's address.
func NewConsole(ctx context.Context, dir string) (*Console, error) {
	var name [4]byte
	_, _ = rand.Read(name[:]) // never fails
	path := filepath.Join(dir, "c"+hex.EncodeToString(name[:]))
	l, err := unixsocket.Listen(ctx, path, unixsocket.Private)
	if err != nil {
		return nil, fmt.Errorf("console socket: %w", err)
	}
	return &Console{path, l}, nil
}

// Offer implements Terminal.
func (c *Console) Offer(pipes Pipes) ([]string, Pipes) {
	return []string{"--console-socket", c.Path}, pipes
}

// Close implements Terminal.
func (c *Console) Close() { _ = c.listener.Close() }

// Master returns what a runtime that has exited has sent: it is in the queue,
// so Master does not block.
func (c *Console) Master() (*os.File, error) {
	conn, err := c.accept()
	if err != nil {
		return nil, fmt.Errorf("the runtime sent no terminal: %w", err)
	}
	defer unix.Close(conn)
	name, control := make([]byte, 256), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(conn, name, control, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("receive terminal from the runtime: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) == 0 {
		return nil, errors.Join(errors.New("the runtime sent a message without a terminal"), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return nil, errors.Join(errors.New("the runtime sent a message without a terminal"), err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		_ = unix.Close(fds[0])
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), "terminal"), nil
}

// accept accepts the connection that a runtime has made, if there is one.
func (c *Console) accept() (conn int, err error) {
	raw, err := c.listener.SyscallConn()
	if err != nil {
		return -1, err
	}
	failed := raw.Control(func(listener uintptr) {
		conn, _, err = unix.Accept4(int(listener), unix.SOCK_CLOEXEC) // Go's listeners do not block
	})
	return conn, errors.Join(failed, err)
}
