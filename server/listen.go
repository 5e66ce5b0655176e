package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/flock"
	"github.com/crius-run/crius/internal/owner"
	"github.com/crius-run/crius/internal/peer"
	"github.com/crius-run/crius/internal/unixsocket"
)

// maxSocketPath is the size of sockaddr_un's path, less the terminating zero.
const maxSocketPath = 107

// Listen binds the CRI socket of cfg, owned by this process's user and by
// cfg.SocketGroup, and never more permissive than cfg.SocketMode. It makes a
// missing directory with mode 0700, or 0711 if a group may connect. It replaces
// the socket of a dead server; a socket that answers, or a path held by a
// server that is starting or stopping, is fault.Exists.
//
// Closing the listener removes the socket. The lock file beside it stays until
// Abandon.
func Listen(ctx context.Context, cfg Config) (net.Listener, error) {
	return address{"api.listen", cfg.Listen}.listen(ctx, cfg)
}

// ListenAsCrio binds cfg.CrioSocket as Listen binds the CRI socket.
func ListenAsCrio(ctx context.Context, cfg Config) (net.Listener, error) {
	return address{"api.crio_socket", cfg.CrioSocket}.listen(ctx, cfg)
}

// address is the path of a socket and the option that names it.
type address struct{ option, path string }

func (a address) listen(ctx context.Context, cfg Config) (net.Listener, error) {
	if !filepath.IsAbs(a.path) || len(a.path) > maxSocketPath {
		return nil, fmt.Errorf("%s = %q: give an absolute path of at most %d bytes: %w", a.option, a.path, maxSocketPath, fault.Invalid)
	}
	if cfg.SocketMode&^fs.ModePerm != 0 || cfg.SocketMode == 0 {
		return nil, fmt.Errorf("api.socket_mode = %#o: give permission bits such as 0660: %w", cfg.SocketMode, fault.Invalid)
	}
	gid, err := groupID(cfg.SocketGroup)
	if err != nil {
		return nil, err
	}
	dirMode := os.FileMode(0o700)
	if gid != os.Getegid() {
		dirMode = 0o711 // for the group, to which the directory does not belong
	}
	if err := os.MkdirAll(filepath.Dir(a.path), dirMode); err != nil {
		return nil, fmt.Errorf("directory of the CRI socket: %w", err)
	}
	lock, err := a.lock()
	if err != nil {
		return nil, err
	}
	l, err := a.bind(ctx, cfg.SocketMode, gid)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return &listener{Listener: l, lock: lock}, nil
}

// Abandon removes what a server that listened at path has left there: the
// socket if no server answers at it, the lock file and, if that leaves it
// empty, the directory. While another server holds the path all of that stays.
func Abandon(path string) error {
	a := address{path: path} // no returned error names the option
	lock, err := a.lock()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fault.Exists) {
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := a.removeStale(); err != nil && !errors.Is(err, fault.Exists) {
		return err
	}
	if err := os.Remove(lock.Name()); err != nil {
		return err
	}
	if err := os.Remove(filepath.Dir(path)); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EBUSY) {
		return err
	}
	return nil
}

// listener is a bound socket with the lock that guards its path.
type listener struct {
	net.Listener
	lock *os.File
}

// Close removes the socket before it lets the next server have the path.
func (l *listener) Close() error {
	return errors.Join(l.Listener.Close(), flock.Release(l.lock))
}

func (a address) lock() (*os.File, error) {
	lock, err := os.OpenFile(a.path+".lock", os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock CRI socket: %w", err)
	}
	err = flock.Try(lock)
	if errors.Is(err, flock.ErrBusy) || err == nil && !named(lock) {
		err = fmt.Errorf("%s is served by %s; stop it or set a different %s: %w", a.path, owner.Owner{PID: flock.Holder(lock)}, a.option, fault.Exists)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock CRI socket: %w", err), lock.Close())
	}
	return lock, nil
}

// named reports whether an open file still has its name: a file that Abandon
// has removed locks nothing.
func named(file *os.File) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	found, err := os.Lstat(file.Name())
	return err == nil && os.SameFile(opened, found)
}

// groupID resolves socket_group.
func groupID(group string) (int, error) {
	if group == "" {
		return os.Getegid(), nil
	}
	if gid, err := strconv.ParseUint(group, 10, 31); err == nil {
		return int(gid), nil
	}
	known, err := user.LookupGroup(group)
	if err != nil {
		return 0, fmt.Errorf("api.socket_group = %q: %w; create the group or give a number: %w", group, err, fault.Invalid)
	}
	return strconv.Atoi(known.Gid)
}

func (a address) bind(ctx context.Context, mode os.FileMode, gid int) (net.Listener, error) {
	if err := a.removeStale(); err != nil {
		return nil, err
	}
	l, err := unixsocket.Listen(ctx, a.path, unixsocket.Access{Mode: mode, Group: gid})
	if err != nil {
		return nil, fmt.Errorf("CRI socket: %w", err)
	}
	return l, nil
}

// removeStale frees the path if it holds only a socket without a listener.
func (a address) removeStale() error {
	info, err := os.Lstat(a.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("CRI socket: %w", err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket; move it away or set a different %s: %w", a.path, a.option, fault.Exists)
	}
	conn, err := net.DialTimeout("unix", a.path, time.Second)
	if err == nil {
		defer conn.Close()
		return fmt.Errorf("another process serves %s: %s; stop it or set a different %s: %w", a.path, peer.Of(conn), a.option, fault.Exists)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("cannot determine whether a process serves %s: %w: %w", a.path, err, fault.Exists)
	}
	if err := os.Remove(a.path); err != nil {
		return fmt.Errorf("stale CRI socket: %w", err)
	}
	return nil
}
