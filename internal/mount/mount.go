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
	"path/filepath"
	"slices"
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
		if more, err := detach(path); !more || err != nil {
			return err
		}
	}
}

// detach unmounts the uppermost mount at path, and reports whether there was one.
func detach(path string) (found bool, err error) {
	switch err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err {
	case nil:
		return true, nil
	case unix.ENOENT, unix.ENOTDIR:
		return false, nil
	case unix.EINVAL: // not a mount point, or one locked by another user namespace
		if still, serr := Mounted(path); serr == nil && !still {
			return false, nil
		}
		return false, &os.PathError{Op: "unmount", Path: path, Err: err}
	default:
		return false, &os.PathError{Op: "unmount", Path: path, Err: err}
	}
}

// UnmountBelow unmounts everything mounted at dir or below, and nothing elsewhere: a
// mount goes with all that is mounted in it, so that what it has hidden can be reached
// afterwards, and nothing of that propagates to where the same directory is mounted too.
func UnmountBelow(dir string) error {
	points, err := Under(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, point := range slices.Backward(points) { // parents first
		errs = append(errs, unmountTree(point))
	}
	return errors.Join(errs...)
}

// unmountTree is Unmount for a path from the mount table. Such a path has no links: if
// there is one now, something else has been mounted or renamed.
func unmountTree(point string) error {
	parent, err := unix.Openat2(unix.AT_FDCWD, filepath.Dir(point), &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	switch err {
	case nil:
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP:
		return nil // it went with a parent, or is hidden
	default:
		return &os.PathError{Op: "open parent of mount point", Path: point, Err: err}
	}
	defer unix.Close(parent)
	for {
		makePrivate(parent, filepath.Base(point))
		if more, err := detach(ofDescriptor(parent) + "/" + filepath.Base(point)); !more || err != nil {
			return err
		}
	}
}

// makePrivate ends the propagation between the uppermost mount at a name, with all that
// is mounted in it, and others. It does nothing if nothing is mounted there.
func makePrivate(parent int, name string) {
	fd, err := unix.Openat(parent, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_ = unix.Mount("", ofDescriptor(fd), "", unix.MS_REC|unix.MS_PRIVATE, "")
}

func ofDescriptor(fd int) string { return "/proc/thread-self/fd/" + strconv.Itoa(fd) }

// CanMap reports whether a bind mount of path can show its files with the owners that the user
// namespace at userNS gives them: the kernel and the file system must support ID-mapped mounts.
func CanMap(userNS, path string) bool {
	users, err := unix.Open(userNS, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(users)
	tree, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return false
	}
	defer unix.Close(tree)
	return unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users)}) == nil
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
	return mountTmpfs("shm", path, "mode=1777,size="+strconv.FormatInt(size, 10), label, harmless)
}

// Files mounts at path, as Shm does, a tmpfs for a handful of small files, 1
// MiB in total. Only root may enter it until its mode is changed.
func Files(path, label string) error {
	return mountTmpfs("files", path, "mode=0700,size=1m,nr_inodes=16", label, harmless)
}

// Copies mounts at path, as Files does, a tmpfs for the files that a container
// gets from the node, 16 MiB in total, with room for what the container writes
// there.
func Copies(path, label string) error {
	return mountTmpfs("copies", path, "mode=0700,size=16m,nr_inodes=4096", label, harmless)
}

// Devices mounts at path, as Files does, a tmpfs for device nodes, which can be used there.
func Devices(path, label string) error {
	return mountTmpfs("devices", path, "mode=0700,size=4k,nr_inodes=8192", label, unix.MS_NOSUID)
}

const harmless = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

func mountTmpfs(name, path, options, label string, flags uintptr) error {
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
