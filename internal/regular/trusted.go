package regular

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// ReadTrusted is Read for a file that controls what this process does: it must
// belong to this process's user and be writable by no other. A file that is not
// trusted, not regular or too large is fault.Precondition, because no request
// chose it.
func ReadTrusted(path string, limit int64) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(fd)
	st, err := trusted(fd, path)
	switch {
	case err != nil:
		return nil, err
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, fmt.Errorf("%s is not a regular file: %w", path, fault.Precondition)
	case st.Size > limit:
		return nil, fmt.Errorf("%s is larger than %d bytes: %w", path, limit, fault.Precondition)
	}
	return ReadFD(fd, path, limit)
}

// Program checks that path is an executable file which ReadTrusted would trust.
func Program(path string) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w: %w", path, err, fault.Precondition)
	}
	defer unix.Close(fd)
	st, err := trusted(fd, path)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o111 == 0 {
		return fmt.Errorf("%s is not an executable file: %w", path, fault.Precondition)
	}
	return nil
}

// Names lists a directory of at most most entries. It must be trusted, like the
// files of ReadTrusted, else the error is fault.Precondition.
func Names(dir string, most int) ([]string, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("%s is not a directory: %w", dir, fault.Precondition)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	at := os.NewFile(uintptr(fd), dir)
	defer at.Close()
	if _, err := trusted(fd, dir); err != nil {
		return nil, err
	}
	names, err := at.Readdirnames(most + 1)
	if errors.Is(err, io.EOF) { // it is empty
		err = nil
	}
	if len(names) > most {
		err = fmt.Errorf("%s has more than %d entries: %w", dir, most, fault.Precondition)
	}
	return names, err
}

// trusted checks and describes a file that only this process's user can change.
func trusted(fd int, name string) (st unix.Stat_t, err error) {
	if err := unix.Fstat(fd, &st); err != nil {
		return st, fmt.Errorf("%s: %w", name, err)
	}
	if int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return st, fmt.Errorf("%s is writable by users other than UID %d (owner %d, mode %04o): %w", name, os.Geteuid(), st.Uid, st.Mode&0o7777, fault.Precondition)
	}
	return st, nil
}
