// Package unixsocket binds sockets in the file system without a moment in which
// the umask decides who may connect.
package unixsocket

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Access determines who may connect to a socket.
type Access struct {
	Mode  fs.FileMode // permission bits, regardless of the umask
	Group int         // group of the file, even in a set-group-ID directory
}

// Private lets only the user of this process, and root, connect.
var Private = Access{Mode: 0o600, Group: os.Getegid()}

// Listen listens at path, which must not exist. No client can connect before
// the file has its group and mode. Closing the listener removes the file.
func Listen(ctx context.Context, path string, access Access) (*net.UnixListener, error) {
	l, err := listenClosed(ctx, path)
	if err != nil {
		return nil, err
	}
	if err := access.open(path); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Bind gives the socket fd a private file at path.
func Bind(fd int, path string) error {
	if err := errors.Join(shut(fd), unix.Bind(fd, &unix.SockaddrUnix{Name: path})); err != nil {
		return err
	}
	return Private.open(path)
}

// listenClosed listens at path, where only root may connect.
func listenClosed(ctx context.Context, path string) (*net.UnixListener, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		ctlErr := c.Control(func(fd uintptr) { err = shut(int(fd)) })
		return errors.Join(ctlErr, err)
	}}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// shut makes bind create a file without permissions: Linux gives it the mode of
// the socket's own inode, less the umask.
func shut(fd int) error { return unix.Fchmod(fd, 0) }

// open gives a file without permissions its group, and then its mode.
func (a Access) open(path string) error {
	if err := os.Lchown(path, os.Geteuid(), a.Group); err != nil {
		return err
	}
	return os.Chmod(path, a.Mode.Perm())
}
