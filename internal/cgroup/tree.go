package cgroup

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/fault"
)

// Remove removes the cgroup path with everything below it from every hierarchy.
// A cgroup is busy for a moment after its last process has ended: Remove waits
// for that, up to two seconds. A missing cgroup is not an error; one that still
// has processes is fault.Precondition.
func Remove(ctx context.Context, cgroup string) error {
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
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for _, h := range all {
		if err := h.remove(ctx, cgroup); err != nil {
			return failed("remove cgroup", h.dir(cgroup), err)
		}
	}
	return nil
}

func (h hierarchy) remove(ctx context.Context, cgroup string) error {
	for pauses := backoff.New(time.Millisecond, 50*time.Millisecond); ; {
		over := ctx.Err() != nil
		err := walk(h.dir(cgroup), nil, func(parent int, name string, _ int) error {
			err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR)
			if err == unix.ENOENT {
				return nil
			}
			return err
		})
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		if over {
			return problem{fault.Precondition, "it still has processes"}
		}
		pauses.Pause(ctx) // v1 does not announce the end of the last process
	}
}

// inode identifies a directory.
type inode struct{ dev, ino uint64 }

// level is a cgroup on the way down.
type level struct {
	self  inode
	name  string
	below []string // its children still to be visited
}

// errMoved cannot happen: the kernel does not move cgroups to other parents.
var errMoved = problem{fault.Precondition, "it was moved meanwhile"}

// walk visits the cgroup at path and those below it. It calls enter, if not
// nil, for each of those below before its children, with the path from the top
// to its parent and its name, and skips those for which enter returns false. It
// calls leave, if not nil, for each after its children: with the parent's
// directory, its name there and its own directory. Cgroups that are gone are
// skipped.
//
// It walks by directory descriptors, because a container that may make cgroups
// may make paths longer than the kernel accepts, and has no more than two of
// them open at any depth.
func walk(path string, enter func(way []byte, name string) bool, leave func(parent int, name string, dir int) error) error {
	at, self, err := openDir(unix.AT_FDCWD, path)
	if at == nil {
		return err
	}
	defer func() { at.Close() }()
	names, err := children(at)
	if err != nil {
		return err
	}
	down, way := []level{{self, path, names}}, []byte(nil)
	for {
		last := &down[len(down)-1]
		if n := len(last.below); n > 0 {
			name := last.below[n-1]
			last.below = last.below[:n-1]
			if enter != nil && !enter(way, name) {
				continue
			}
			next, self, err := openDir(int(at.Fd()), name)
			if err != nil {
				return err
			}
			if next == nil {
				continue
			}
			at.Close()
			at = next
			if names, err = children(at); err != nil {
				return err
			}
			down, way = append(down, level{self, name, names}), append(append(way, '/'), name...)
			continue
		}
		if len(down) == 1 {
			return leaving(leave, unix.AT_FDCWD, path, at)
		}
		up, self, err := openDir(int(at.Fd()), "..")
		if err == nil && (up == nil || self != down[len(down)-2].self) {
			err = errMoved
		}
		if err == nil {
			err = leaving(leave, int(up.Fd()), last.name, at)
		}
		if up != nil {
			at.Close()
			at = up
		}
		if err != nil {
			return err
		}
		way = way[:len(way)-len(last.name)-1]
		down = down[:len(down)-1]
	}
}

func leaving(leave func(parent int, name string, dir int) error, parent int, name string, dir *os.File) error {
	if leave == nil {
		return nil
	}
	return leave(parent, name, int(dir.Fd()))
}

// openDir opens a directory; nil if it is gone or cannot exist: a pod may
// request a parent that is a file of a cgroup.
func openDir(dir int, name string) (*os.File, inode, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if gone(err) || err == unix.ENOTDIR {
		return nil, inode{}, nil
	}
	if err != nil {
		return nil, inode{}, err
	}
	f := os.NewFile(uintptr(fd), name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, inode{}, err
	}
	return f, inode{st.Dev, st.Ino}, nil
}

// children returns the names of the cgroups in a directory; none if it is gone.
func children(dir *os.File) ([]string, error) {
	entries, err := dir.ReadDir(-1)
	if err != nil && !gone(err) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// gone reports whether err means that the cgroup has been removed.
func gone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) }

// read reads a file of the cgroup with directory dir.
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
