// Package mount holds the few mount operations that crius makes itself, all of
// them safe to repeat.
//
// Every path is taken literally: a symbolic link as its last element is never
// followed, so that an unmount cannot be redirected, and no call waits for the
// file system that is mounted at a path (a dead NFS or FUSE server does not
// block).
package mount

import (
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Mounted reports whether something is mounted at path itself. Nothing is
// mounted at a missing path.
func Mounted(path string) (bool, error) {
	var stx unix.Statx_t
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	switch err := unix.Statx(unix.AT_FDCWD, path, flags, 0, &stx); err {
	case nil:
	case unix.ENOENT, unix.ENOTDIR:
		return false, nil
	default:
		return false, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	if stx.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return stx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
	}
	return listed(path) // Linux before 5.8
}

// Unmount detaches everything mounted at path, including stacked mounts. The
// detachment is lazy: it succeeds at once even if files below path are open,
// and the file systems go away with their last user.
//
// Nil means that nothing is mounted at path any more, so that the rest may be
// deleted; Unmount also returns nil if nothing was mounted, or path does not
// exist.
func Unmount(path string) error {
	for {
		switch err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err {
		case nil:
		case unix.ENOENT, unix.ENOTDIR:
			return nil
		case unix.EINVAL: // not a mount point, or one locked by another user namespace
			if still, serr := Mounted(path); serr == nil && !still {
				return nil
			}
			return &os.PathError{Op: "unmount", Path: path, Err: err}
		default:
			return &os.PathError{Op: "unmount", Path: path, Err: err}
		}
	}
}

// UnmountBelow unmounts everything mounted at dir or below.
func UnmountBelow(dir string) error {
	points, err := Under(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, point := range points {
		errs = append(errs, Unmount(point))
	}
	return errors.Join(errs...)
}

// RemoveAll is os.RemoveAll for a directory in which single files may be mount
// points, as killed runtimes leave them. No directory in it may be a mount
// point, because RemoveAll would delete what is mounted there.
func RemoveAll(dir string) error {
	err := os.RemoveAll(dir)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	if err := UnmountBelow(dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// RemoveTree removes a directory in which others may have mounted anything, also
// directories: it unmounts all of that first. If something stays mounted, RemoveTree
// removes nothing, because that would delete what is mounted. Of a symbolic link it
// removes the link alone.
func RemoveTree(dir string) error {
	switch st, err := os.Lstat(dir); {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case st.Mode().Type() == os.ModeSymlink:
		return os.Remove(dir)
	}
	if err := UnmountBelow(dir); err != nil {
		return err
	}
	left, err := Under(dir)
	if err == nil && len(left) > 0 {
		err = &os.PathError{Op: "remove", Path: dir, Err: unix.EBUSY}
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// Isolate gives the calling thread, which must be one of thread.Run's, a mount
// namespace of its own. What is mounted in it is not seen outside, and is gone
// with its last process; what is mounted or unmounted outside is seen in it.
func Isolate() error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return &os.PathError{Op: "receive mounts of the node at", Path: "/", Err: err}
	}
	return nil
}

// Shm mounts at path the /dev/shm of a pod: a tmpfs of at most size bytes that
// every user may write to and from which nothing can be executed. A missing
// directory is made. A non-empty label is the SELinux context of all files in
// it. If path already is a mount point, Shm leaves it unchanged.
func Shm(path string, size int64, label string) error {
	if size <= 0 {
		return &os.PathError{Op: "mount shm", Path: path, Err: invalid("size " + strconv.FormatInt(size, 10) + " is not positive")}
	}
	return mountTmpfs("shm", path, "mode=1777,size="+strconv.FormatInt(size, 10), label)
}

// Files mounts at path, as Shm does, a tmpfs for a handful of small files, 1
// MiB in total. Only root may enter it until its mode is changed.
func Files(path, label string) error {
	return mountTmpfs("files", path, "mode=0700,size=1m,nr_inodes=16", label)
}

// Copies mounts at path, as Files does, a tmpfs for the files that a container
// gets from the node, 16 MiB in total, with room for what the container writes
// there.
func Copies(path, label string) error {
	return mountTmpfs("copies", path, "mode=0700,size=16m,nr_inodes=4096", label)
}

func mountTmpfs(name, path, options, label string) error {
	failed := func(err error) error { return &os.PathError{Op: "mount " + name, Path: path, Err: err} }
	if label != "" {
		if strings.ContainsAny(label, "\"\\\n\x00") {
			return failed(invalid("SELinux label " + strconv.Quote(label) + " cannot be a mount option"))
		}
		options += `,context="` + label + `"` // quoted: categories contain commas
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if done, err := Mounted(path); done || err != nil {
		return err
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
	if err := unix.Mount(name, path, "tmpfs", flags, options); err != nil {
		return failed(err)
	}
	return nil
}

// invalid is an error text that wraps fault.Invalid; the monitor links this
// package, which therefore does without fmt.
type invalid string

func (e invalid) Error() string { return string(e) }
func (e invalid) Unwrap() error { return fault.Invalid }
