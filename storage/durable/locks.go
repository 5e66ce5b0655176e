package durable

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/peer"
)

// Locks are the lock files of containers/storage. The library waits for them without
// limit and cannot be cancelled, so callers first check whether another process holds
// one. (A lock taken in between is still waited for without limit.)
//
// They are record locks, which a process loses with the first descriptor of the
// file that it closes, whoever opened it: these here stay open until the library
// has none any more.
type Locks struct {
	paths []string

	mu    sync.Mutex
	files map[string]*os.File // those that are there: the library makes some at their first use
}

// What is about to be done, and with which locks of others that collides.
const (
	ToRead  = unix.F_RDLCK
	ToWrite = unix.F_WRLCK
)

// LockTime is how long others may keep a lock before those who wait here are
// told; they try again.
const LockTime = 10 * time.Second

// NewLocks opens no file yet.
func NewLocks(roots Roots) *Locks {
	l := &Locks{
		paths: []string{
			filepath.Join(roots.Graph, "storage.lock"),
			filepath.Join(roots.Graph, "overlay-containers", "containers.lock"),
			filepath.Join(roots.Run, "overlay-layers", "mountpoints.lock"),
		},
		files: map[string]*os.File{},
	}
	for _, root := range roots.All() {
		l.paths = append(l.paths, filepath.Join(root, "overlay-layers", "layers.lock"), filepath.Join(root, "overlay-images", "images.lock"))
	}
	return l
}

// Close must not be called before the library has closed its locks.
func (l *Locks) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, f := range l.files {
		errs = append(errs, f.Close())
	}
	clear(l.files)
	return errors.Join(errs...)
}

// Held says which lock another process holds, and which one that is.
func (l *Locks) Held(purpose int16) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, path := range l.paths {
		f := l.files[path]
		if f == nil {
			var err error
			if f, err = os.Open(path); errors.Is(err, fs.ErrNotExist) {
				continue
			} else if err != nil {
				return err
			}
			l.files[path] = f
		}
		lock := unix.Flock_t{Type: purpose}
		if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil {
			return &os.PathError{Op: "query lock", Path: path, Err: err}
		}
		if lock.Type != unix.F_UNLCK {
			return fmt.Errorf("%s is locked by %s", path, peer.Name(lock.Pid))
		}
	}
	return nil
}

// Await waits until no other process holds a lock. If one keeps it for too long
// the error is fault.Timeout.
func (l *Locks) Await(ctx context.Context, purpose int16) error {
	held := l.Held(purpose)
	if held == nil {
		return nil
	}
	const often = 50 * time.Millisecond
	limit := time.NewTimer(LockTime)
	defer limit.Stop()
	for held != nil {
		select {
		case <-time.After(often):
			held = l.Held(purpose)
		case <-limit.C:
			return fmt.Errorf("%w and was not released within %s: %w", held, LockTime, fault.Timeout)
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", held, context.Cause(ctx))
		}
	}
	return nil
}
