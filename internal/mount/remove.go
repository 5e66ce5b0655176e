package mount

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
)

// RemoveAll is os.RemoveAll for a directory in which files, or directories, may be mount
// points, as killed runtimes leave them: those it unmounts, and nothing that is mounted
// is deleted.
func RemoveAll(dir string) error {
	err := removeAll(dir)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	if err := UnmountBelow(dir); err != nil {
		return err
	}
	return removeAll(dir)
}

// RemoveTree removes a directory in which others may have mounted anything, also
// directories: it unmounts all of that first. If something stays mounted, RemoveTree
// removes nothing, because that would delete what is mounted, and it does not enter what
// is mounted meanwhile. Of a symbolic link it removes the link alone.
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
	return removeAll(dir)
}

func removeAll(dir string) error {
	parent, err := os.Open(filepath.Dir(dir))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer parent.Close()
	return removeAt(parent, filepath.Base(dir))
}

// removeAt removes a file, or a directory with all that is in it, and enters no mount. A
// missing one is no error.
func removeAt(parent *os.File, name string) error {
	unlink := func(flags int) error {
		err := eintr.Retry(func() error { return unix.Unlinkat(int(parent.Fd()), name, flags) })
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EISDIR) {
			return &os.PathError{Op: "remove", Path: filepath.Join(parent.Name(), name), Err: err}
		}
		return err
	}
	err := unlink(0)
	if errors.Is(err, unix.EISDIR) {
		if err = removeEntries(parent, name); err == nil {
			err = unlink(unix.AT_REMOVEDIR)
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// removeEntries removes all that is in a directory on which nothing is mounted.
func removeEntries(parent *os.File, name string) error {
	path := filepath.Join(parent.Name(), name)
	var fd int
	err := eintr.Retry(func() (err error) {
		fd, err = unix.Openat2(int(parent.Fd()), name, &unix.OpenHow{
			Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		return err
	})
	if errors.Is(err, unix.EXDEV) {
		err = unix.EBUSY // as for a file on which something is mounted
	}
	if err != nil {
		return &os.PathError{Op: "open to remove", Path: path, Err: err}
	}
	dir := os.NewFile(uintptr(fd), path)
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, removeAt(dir, name))
	}
	return errors.Join(errs...)
}
