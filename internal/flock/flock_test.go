package flock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// open opens a file twice: locks belong to what was opened, even in one process.
func open(t *testing.T) (mine, other *os.File) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lock")
	for _, f := range []**os.File{&mine, &other} {
		var err error
		if *f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*f).Close() })
	}
	return mine, other
}

func TestLockedFileIsBusyUntilItIsClosed(t *testing.T) {
	mine, other := open(t)
	if err := Try(other); err != nil {
		t.Fatal(err)
	}
	var named *os.PathError
	if err := Try(mine); !errors.Is(err, ErrBusy) || !errors.As(err, &named) || named.Path != mine.Name() {
		t.Errorf("locked by another: %v, want %v with the path", err, ErrBusy)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := TryUntil(over, mine, time.Hour); !errors.Is(err, ErrBusy) {
		t.Errorf("locked by another until the context is over: %v, want %v", err, ErrBusy)
	}
	other.Close()
	if err := Try(mine); err != nil {
		t.Errorf("after the other was closed: %v", err)
	}
	if err := Try(mine); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

func TestReleasedFileIsFreeWhoeverHasACopy(t *testing.T) {
	mine, other := open(t)
	if err := Try(other); err != nil {
		t.Fatal(err)
	}
	forked, err := unix.FcntlInt(other.Fd(), unix.F_DUPFD_CLOEXEC, 0) // as in a child before it executes its program
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(forked)
	if err := Release(other); err != nil {
		t.Fatal(err)
	}
	if err := Try(mine); err != nil {
		t.Error(err)
	}
	if err := Try(other); !errors.Is(err, unix.EBADF) {
		t.Errorf("the released file is still open: %v", err)
	}
}

func TestLockIsAwaited(t *testing.T) {
	for name, await := range map[string]func(*os.File) error{
		"Wait":     Wait,
		"TryUntil": func(f *os.File) error { return TryUntil(t.Context(), f, time.Millisecond) },
	} {
		mine, other := open(t)
		if err := Try(other); err != nil {
			t.Fatal(err)
		}
		locked := make(chan error, 1)
		go func() { locked <- await(mine) }()
		select {
		case err := <-locked:
			t.Errorf("%s returned %v while the file was locked", name, err)
		default:
		}
		other.Close()
		if err := <-locked; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOtherErrorsAreNotBusy(t *testing.T) {
	mine, _ := open(t)
	mine.Close()
	for name, err := range map[string]error{"Try": Try(mine), "TryUntil": TryUntil(t.Context(), mine, time.Hour), "Wait": Wait(mine)} {
		if !errors.Is(err, unix.EBADF) || errors.Is(err, ErrBusy) {
			t.Errorf("%s of a closed file: %v", name, err)
		}
	}
}

func TestHolderIsTheProcessThatHasLocked(t *testing.T) {
	t.Parallel()
	mine, other := open(t)
	if pid := Holder(mine); pid != 0 {
		t.Errorf("nobody has locked, but process %d", pid)
	}
	if err := Try(mine); err != nil {
		t.Fatal(err)
	}
	if pid := Holder(other); pid != os.Getpid() {
		t.Errorf("process %d has locked, want %d", pid, os.Getpid())
	}
}
