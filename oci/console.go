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

func (c *console) close() { _ = c.UnixListener.Close() }

// lastWords is what a runtime that failed has written to the terminal, as crun
// does once it has made one.
func (c *console) lastWords() string {
	if c == nil {
		return ""
	}
	master, err := c.master()
	if err != nil {
		return ""
	}
	defer master.Close()
	colours := regexp.MustCompile("\x1b\\[[0-9;]*m|\r")
	return colours.ReplaceAllString(lastWords(master), "")
}

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
