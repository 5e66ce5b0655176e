package wire

import (
	"errors"
	"syscall"
	"unsafe"
)

// Open opens the file whose path is the concatenation of parts. Unlike
// syscall.Open it needs no memory except the stack's.
func Open(flags int, mode uint32, parts ...string) (fd int, err error) {
	return at(syscall.SYS_OPENAT, flags|syscall.O_CLOEXEC|syscall.O_LARGEFILE, mode, parts)
}

// OpenBelow opens the file at path, which begins with the directory base. Links
// are followed on the way to base, and none after that. Errors describe the
// cause.
func OpenBelow(base, path string, flags int, mode uint32) (fd int, err error) {
	name := path[len(base):]
	for len(name) > 0 && name[0] == '/' {
		name = name[1:]
	}
	const opath = 0x200000 // O_PATH
	dir, err := Open(opath|syscall.O_DIRECTORY, 0, base, "/")
	if err != nil {
		return -1, err
	}
	defer syscall.Close(dir)
	var text [4096]byte
	if copy(text[:], name) == len(text) {
		return -1, syscall.ENAMETOOLONG
	}
	const openat2, noSymlinks, beneath = 437, 0x04, 0x08 // on every architecture
	how := [3]uint64{uint64(flags | syscall.O_CLOEXEC | syscall.O_LARGEFILE), uint64(mode), noSymlinks | beneath}
	for {
		result, _, errno := syscall.Syscall6(openat2, uintptr(dir), uintptr(unsafe.Pointer(&text)), uintptr(unsafe.Pointer(&how)), unsafe.Sizeof(how), 0, 0)
		switch errno {
		case 0:
			return int(result), nil
		case syscall.EINTR:
		case syscall.ELOOP:
			return -1, Text("symbolic links are not allowed below " + base)
		default:
			return -1, errno
		}
	}
}

// Unlink removes a file, in the same way.
func Unlink(parts ...string) error {
	_, err := at(syscall.SYS_UNLINKAT, 0, 0, parts)
	return err
}

// at makes a system call on a path.
func at(call uintptr, flags int, mode uint32, parts []string) (int, error) {
	var path [4096]byte // PATH_MAX, with the NUL
	n := 0
	for _, part := range parts {
		if n+len(part) >= len(path) {
			return -1, syscall.ENAMETOOLONG
		}
		n += copy(path[n:], part)
	}
	cwd := -100 // AT_FDCWD
	for {
		result, _, errno := syscall.Syscall6(call, uintptr(cwd), uintptr(unsafe.Pointer(&path)), uintptr(flags), uintptr(mode), 0, 0)
		switch errno {
		case 0:
			return int(result), nil
		case syscall.EINTR:
		default:
			return -1, errno
		}
	}
}

// ReadFile reads the beginning of a file into buf, as much as fits.
func ReadFile(buf []byte, parts ...string) ([]byte, error) {
	fd, err := Open(syscall.O_RDONLY, 0, parts...)
	if err != nil {
		return nil, err
	}
	n := 0
	for n < len(buf) {
		got, failed := syscall.Read(fd, buf[n:])
		if failed == syscall.EINTR {
			continue
		}
		if err = failed; failed != nil || got == 0 {
			break
		}
		n += got
	}
	_ = syscall.Close(fd)
	return buf[:n], err
}

// WriteFile replaces a file atomically: a reader sees the old content or the
// new. With durable the new content is on disk when WriteFile returns, and
// survives a power cut.
func WriteFile(path string, content []byte, durable bool) error {
	tmp := path + ".tmp"
	err := writeNew(tmp, content, durable)
	if err == nil {
		err = syscall.Rename(tmp, path)
	}
	if err != nil {
		_ = Unlink(tmp)
		return Fail("write "+path, err)
	}
	if durable {
		err = syncDir(Parent(path))
	}
	if err != nil {
		return Fail("sync directory of "+path, err)
	}
	return nil
}

func writeNew(path string, content []byte, durable bool) error {
	fd, err := Open(syscall.O_WRONLY|syscall.O_CREAT|syscall.O_TRUNC|syscall.O_NOFOLLOW, 0o600, path)
	if err != nil {
		return err
	}
	for err == nil && len(content) > 0 {
		var n int
		if n, err = syscall.Write(fd, content); errors.Is(err, syscall.EINTR) {
			err = nil
		}
		content = content[max(n, 0):]
	}
	if err == nil && durable {
		err = syscall.Fsync(fd)
	}
	if closed := syscall.Close(fd); err == nil {
		err = closed
	}
	return err
}

func syncDir(path string) error {
	fd, err := Open(syscall.O_RDONLY|syscall.O_DIRECTORY, 0, path)
	if err != nil {
		return err
	}
	err = syscall.Fsync(fd)
	_ = syscall.Close(fd)
	return err
}

// Parent returns the directory of path, which must not end in a slash.
func Parent(path string) string {
	for i := len(path) - 1; i > 0; i-- {
		if path[i] == '/' {
			return path[:i]
		}
	}
	if path != "" && path[0] == '/' {
		return "/"
	}
	return "."
}
