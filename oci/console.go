package oci

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"
)

// terminal is where the terminal of a command comes from.
type terminal interface {
	// offer is what a runtime gets for it, besides or instead of the command's pipes.
	offer(pipes stdio) (flags []string, streams stdio)
	// master is our end, once the runtime has started the command or failed to; nil:
	// there is no terminal. It is the caller's.
	master() (*os.File, error)
	close()
}

// newTerminal: where the runtime stays in the foreground, the terminal is its own
// standard streams.
func (t *cliTask) newTerminal(a *Abilities, c Command) (terminal, error) {
	switch {
	case !c.Terminal:
		return noTerminal{}, nil
	case a.quirks.sandboxPID != "":
		return newPTY()
	}
	return newConsole(t.ref.Dir)
}

// wordsOn is what a runtime that failed has written to the terminal, as crun does once
// it has made one.
func wordsOn(t terminal) string {
	master, err := t.master()
	if err != nil || master == nil {
		return ""
	}
	defer master.Close()
	colours := regexp.MustCompile("\x1b\\[[0-9;]*m|\r")
	return colours.ReplaceAllString(lastWords(master), "")
}

type noTerminal struct{}

func (noTerminal) offer(pipes stdio) ([]string, stdio) { return nil, pipes }
func (noTerminal) master() (*os.File, error)           { return nil, nil } //nolint:nilnil // see terminal
func (noTerminal) close()                              {}

// pty is a terminal that this server makes.
type pty struct{ own, theirs *os.File }

func newPTY() (*pty, error) {
	own, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("make terminal: %w", err)
	}
	theirs, err := otherEnd(own)
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
	var number int
	failed := raw.Control(func(fd uintptr) {
		if err = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); err == nil {
			number, err = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	})
	if err := errors.Join(failed, err); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("/dev/pts/%d", number)
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0) // and blocking, as os.OpenFile's would not be
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (p *pty) offer(stdio) ([]string, stdio) { return nil, stdio{p.theirs, p.theirs, p.theirs} }

func (p *pty) master() (*os.File, error) {
	_ = p.theirs.Close() // else its end would not be seen
	own := p.own
	p.own = nil
	return own, nil
}

func (p *pty) close() {
	_ = p.theirs.Close()
	if p.own != nil {
		_ = p.own.Close()
	}
}

// console is the socket over which a runtime hands the master of a new terminal.
type console struct {
	*net.UnixListener
	path string
}

// newConsole listens in dir, under a name as short as a socket's address needs.
func newConsole(dir string) (*console, error) {
	var name [4]byte
	_, _ = rand.Read(name[:]) // never fails
	path := filepath.Join(dir, "c"+hex.EncodeToString(name[:]))
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("console socket: %w", err)
	}
	return &console{l, path}, nil
}

func (c *console) offer(pipes stdio) ([]string, stdio) {
	return []string{"--console-socket", c.path}, pipes
}

func (c *console) close() { _ = c.UnixListener.Close() }

// master is what a runtime that has ended has sent: it lies in the queue, so
// nothing here waits.
func (c *console) master() (*os.File, error) {
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

// accept takes the connection that a runtime has made, if there is one.
func (c *console) accept() (conn int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	failed := raw.Control(func(listener uintptr) {
		conn, _, err = unix.Accept4(int(listener), unix.SOCK_CLOEXEC) // Go's listeners do not block
	})
	return conn, errors.Join(failed, err)
}
