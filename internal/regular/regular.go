// Package regular reads files whose name or content is not chosen by crius.
//
// It reads such a file only if it is a regular one of at most a given size, and
// checks that before it opens it: opening a device has side effects, opening a
// named pipe waits for its other end, and reading a file to its end takes as
// much memory as the file claims to have bytes.
package regular

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Read reads the file at path, of at most limit bytes. It follows links. A
// missing file is fs.ErrNotExist, one that is not regular or too large is
// fault.Invalid.
func Read(path string, limit int64) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(fd)
	return ReadFD(fd, path, limit)
}

// ReadIn is Read for the file called name in dir, under the conditions of
// OpenIn.
func ReadIn(dir, name string, limit int64) ([]byte, error) {
	f, err := OpenIn(dir, name, limit)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, f.Name(), limit)
}

// OpenIn opens the file called name in dir for reading. It does not follow a
// link in its place, and dir must belong to this process's user and be writable
// by no other: otherwise the error is fault.Invalid, as for a file that Read
// refuses.
func OpenIn(dir, name string, limit int64) (*os.File, error) {
	path := filepath.Join(dir, name)
	at, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return nil, fmt.Errorf("%s: its directory is writable by users other than UID %d: %w", path, os.Geteuid(), fault.Invalid)
	}
	fd, err := unix.Openat2(at, name, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link: %w", path, fault.Invalid)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(fd)
	return open(fd, path, limit)
}

// ReadFD is Read for the file of a descriptor that was opened with O_PATH;
// errors call it name.
func ReadFD(fd int, name string, limit int64) ([]byte, error) {
	f, err := open(fd, name, limit)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, name, limit)
}

// Open opens the file at path for reading, whatever its size: the reader must
// bound that. A link in its place is not followed; like anything else that is
// not regular it is fault.Invalid.
func Open(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(fd)
	return open(fd, path, math.MaxInt64)
}

// lookups is how often a path is looked up: the kernel gives up on one with ".."
// when anything on the node is renamed or mounted meanwhile (openat2(2), EAGAIN).
const lookups = 128

// OpenBelow opens a file for reading like a process whose root is the directory
// dir, a descriptor: links cannot lead out of it. Anything not regular is
// fault.Invalid.
//
// It is for processes without /proc, by which Open opens what it has looked at.
// So it looks the name up twice, and fails if another file has it meanwhile.
func OpenBelow(dir int, name string) (*os.File, error) {
	fd, err := lookUp(dir, name, unix.O_PATH)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	defer unix.Close(fd)
	looked, err := check(fd, name, math.MaxInt64)
	if err != nil {
		return nil, err
	}
	real, err := lookUp(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	opened, err := check(real, name, math.MaxInt64)
	if err == nil && (opened.Dev != looked.Dev || opened.Ino != looked.Ino) {
		err = fmt.Errorf("%s was replaced while it was opened: %w", name, fault.Invalid)
	}
	if err != nil {
		_ = unix.Close(real)
		return nil, err
	}
	return os.NewFile(uintptr(real), name), nil
}

func lookUp(dir int, name string, flags uint64) (fd int, err error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}
	for range lookups {
		if fd, err = unix.Openat2(dir, name, &how); err != unix.EAGAIN {
			break
		}
	}
	return fd, err
}

// check returns what a descriptor stands for, which must be a regular file of at most limit bytes.
func check(fd int, name string, limit int64) (st unix.Stat_t, err error) {
	if err := unix.Fstat(fd, &st); err != nil {
		return st, fmt.Errorf("%s: %w", name, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return st, fmt.Errorf("%s is not a regular file: %w", name, fault.Invalid)
	}
	if st.Size > limit {
		return st, fmt.Errorf("%s is larger than %d bytes: %w", name, limit, fault.Invalid)
	}
	return st, nil
}

func open(fd int, name string, limit int64) (*os.File, error) {
	if _, err := check(fd, name, limit); err != nil {
		return nil, err
	}
	// Its owner may hold a lease on it, which would block a plain open.
	real, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return os.NewFile(uintptr(real), name), nil
}

func readAll(f *os.File, name string, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("grew beyond %d bytes while being read: %w", limit, fault.Invalid)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return data, nil
}
