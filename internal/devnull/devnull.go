// Package devnull opens null devices that are safe to pass to processes in
// containers.
//
// A process may change the mode and the owner of any file that it has open.
// With the node's own /dev/null as its standard input, root in a container can
// take that away from every other user of the node, and a runtime that gives
// the standard streams to the container's user does so by itself (runc#3674,
// crun#1845, podman#24894).
package devnull

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Open opens a null device, for reading and writing, whose inode nothing else
// uses. It has no name, and is gone after its last close. If the kernel lacks a
// required feature, Open returns the reading end of an empty pipe.
func Open() (*os.File, error) {
	if f, err := directory.open(); err == nil {
		return f, nil
	}
	return emptyPipe()
}

// directory is where the devices are made.
var directory tmpfs

// tmpfs is a file system that is mounted nowhere.
type tmpfs struct {
	mu   sync.Mutex
	root *os.File // nil: not made yet
	made uint64   // files so far
}

func (d *tmpfs) open() (*os.File, error) {
	dir, name, err := d.next()
	if err != nil {
		return nil, err
	}
	if err := unix.Mknodat(dir, name, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		return nil, fmt.Errorf("make null device: %w", err)
	}
	fd, err := unix.Openat(dir, name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err := errors.Join(err, unix.Unlinkat(dir, name, 0)); err != nil {
		return nil, fmt.Errorf("open null device: %w", err)
	}
	f := os.NewFile(uintptr(fd), os.DevNull)
	// Independent of the umask.
	if err := errors.Join(unix.Fchmod(fd, 0o666), labelLike(fd, os.DevNull)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// next returns the directory and a name that is free in it.
func (d *tmpfs) next() (dir int, name string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.root == nil {
		fd, err := detached("tmpfs")
		if err != nil {
			return -1, "", err
		}
		d.root = os.NewFile(uintptr(fd), "null devices")
	}
	d.made++
	return int(d.root.Fd()), strconv.FormatUint(d.made, 10), nil
}

// detached makes a file system that is mounted nowhere, and returns its root.
func detached(kind string) (root int, err error) {
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, os.NewSyscallError("fsconfig", err)
	}
	root, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_NOSUID)
	return root, os.NewSyscallError("fsmount", err)
}

// labelLike gives a file the SELinux label of another one, so that a container
// may use it.
func labelLike(fd int, other string) error {
	const attribute = "security.selinux"
	var label [256]byte
	n, err := unix.Getxattr(other, attribute, label[:])
	if err != nil {
		return nil //nolint:nilerr // there is no SELinux
	}
	return unix.Fsetxattr(fd, attribute, label[:n], 0)
}

func emptyPipe() (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return r, w.Close()
}
