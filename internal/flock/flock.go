// Package flock locks open files against other processes with flock(2). A lock is held until
// [Release], or until the file and all its copies are closed. A child process has a copy from fork
// to exec, even of a file that is closed on exec.
package flock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
	"github.com/crius-run/crius/internal/poll"
)

// ErrBusy is the error for a file that is locked by somebody else.
var ErrBusy = errors.New("locked by another process")

// Try locks a file if nobody else has locked it, and fails with ErrBusy otherwise.
func Try(f *os.File) error { return lock(f, unix.LOCK_EX|unix.LOCK_NB) }

// TryUntil calls Try at once and then once per period until it does not fail with ErrBusy or
// ctx is over, and returns its last error.
func TryUntil(ctx context.Context, f *os.File, period time.Duration) (err error) {
	poll.Until(ctx, period, func() bool {
		err = Try(f)
		return !errors.Is(err, ErrBusy)
	})
	return err
}

// Wait locks a file, however long others keep it locked.
func Wait(f *os.File) error { return lock(f, unix.LOCK_EX) }

// Holder returns the process that has locked a file; 0: there is none, or it is unknown, since it has
// left the lock to a forked copy, for instance, or is in another PID namespace.
func Holder(f *os.File) int {
	var st unix.Stat_t
	table, err := os.ReadFile("/proc/locks")
	if err != nil || unix.Fstat(int(f.Fd()), &st) != nil {
		return 0
	}
	// 1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF; one that waits has "->" before FLOCK.
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for line := range strings.Lines(string(table)) {
		if field := strings.Fields(line); len(field) > 5 && field[1] == "FLOCK" && field[5] == file {
			pid, err := strconv.Atoi(field[4])
			if err != nil || unix.Kill(pid, 0) == unix.ESRCH {
				return 0
			}
			return max(pid, 0)
		}
	}
	return 0
}

// Release unlocks a file at once, whoever has copies of it, and closes it.
func Release(f *os.File) error { return errors.Join(lock(f, unix.LOCK_UN), f.Close()) }

func lock(f *os.File, how int) error {
	err := eintr.Retry(func() error { return unix.Flock(int(f.Fd()), how) }) //nolint:forbidigo // here it belongs
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrBusy
	}
	if err != nil {
		return &os.PathError{Op: "flock", Path: f.Name(), Err: err}
	}
	return nil
}
