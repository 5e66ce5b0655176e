package cgroup

import (
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Remove removes the cgroup path with everything below it from every hierarchy.
// The kernel calls a cgroup busy for a moment after its last process has ended:
// that is waited for, up to two seconds. One that does not exist is no error;
// one that still has processes is fault.Precondition.
func Remove(cgroup string) error {
	cgroup, err := clean(cgroup)
	if err == nil && cgroup == "/" {
		err = problem{fault.Invalid, "the root cgroup cannot be removed"}
	}
	if err != nil {
		return failed("remove cgroup", cgroup, err)
	}
	all, _, err := find()
	if err != nil {
		return failed("remove cgroup", cgroup, err)
	}
	deadline := time.Now().Add(2 * time.Second)
	for _, h := range all {
		if err := h.remove(cgroup, deadline); err != nil {
			return failed("remove cgroup", h.dir(cgroup), err)
		}
	}
	return nil
}

func (h hierarchy) remove(cgroup string, deadline time.Time) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		err := walk(unix.AT_FDCWD, h.dir(cgroup), func(parent int, name string, _ int) error {
			err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR)
			if err == unix.ENOENT {
				return nil
			}
			return err
		})
		if err != unix.EBUSY {
			return err
		}
		if time.Now().After(deadline) {
			return problem{fault.Precondition, "there are processes in it"}
		}
		time.Sleep(wait) // of "no process any more" v1 tells nobody
	}
}

// walk calls visit for the cgroup name in the directory parent and for each
// below it, the lowest first: with the directory it is in, its name there, and
// the directory that it is itself. It goes by open directories, as who may make
// cgroups may make paths longer than the kernel takes. What is gone is passed
// over.
func walk(parent int, name string, visit func(parent int, name string, dir int) error) error {
	fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT || err == unix.ENODEV {
		return nil
	}
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(fd), name)
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil && !gone(err) {
		return err
	}
	for _, e := range entries {
		if e.Type() != fs.ModeDir {
			continue
		}
		if err := walk(fd, e.Name(), visit); err != nil {
			return err
		}
	}
	return visit(parent, name, fd)
}

func gone(err error) bool {
	inner, ok := err.(*os.PathError)
	return ok && (inner.Err == unix.ENOENT || inner.Err == unix.ENODEV)
}

// read reads a file of the cgroup that dir is.
func read(dir int, name string) (string, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var text []byte
	buffer := make([]byte, 4096)
	for {
		n, err := unix.Read(fd, buffer)
		if n > 0 {
			text = append(text, buffer[:n]...)
		}
		switch {
		case err == unix.EINTR:
		case err != nil:
			return "", err
		case n == 0:
			return string(text), nil
		}
	}
}

// write writes a cgroup file, which must exist.
func write(path, value string) error { return writeAt(unix.AT_FDCWD, path, value) }

func writeAt(dir int, name, value string) error {
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for {
		_, err = unix.Write(fd, []byte(value))
		if err != unix.EINTR {
			return err
		}
	}
}
