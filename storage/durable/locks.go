package durable

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.podman.io/storage/pkg/lockfile"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/peer"
	"github.com/crius-run/crius/internal/trace"
)

// Locks are the lock files of containers/storage. The library waits for them without limit and
// cannot be cancelled, so callers first check whether another process holds one. (A lock that is
// taken in between is still waited for without limit.)
//
// The library opens a lock file for writing whenever it takes the lock, even to read, and panics if
// it cannot, as on a read-only disk. It then never releases the lock in this process, and later
// callers block forever. So the check opens the files as well. Panicked handles an open that fails
// between the check and the library's call.
//
// They are record locks, which a process loses with the first descriptor of the file that it
// closes, whoever opened it. So the files here stay open until the library has closed all of its
// own.
type Locks struct {
	paths []string

	mu    sync.Mutex
	files map[string]*os.File // files that exist: the library makes some at their first use

	lost   atomic.Pointer[error] // why a lock is never released in this process
	losing chan struct{}         // closed with lost
}

// What a caller is about to do, which decides with which locks of others it conflicts.
const (
	ToRead  = unix.F_RDLCK
	ToWrite = unix.F_WRLCK
)

// LockTime is how long others may keep a lock before callers get an error. They try again.
const LockTime = 10 * time.Second

// NewLocks returns the locks of a store. It opens no file yet.
func NewLocks(roots Roots) *Locks {
	l := &Locks{
		paths: []string{
			filepath.Join(roots.Graph, "storage.lock"),
			filepath.Join(roots.Graph, "overlay-containers", "containers.lock"),
			filepath.Join(roots.Run, "overlay-layers", "mountpoints.lock"),
		},
		files:  map[string]*os.File{},
		losing: make(chan struct{}),
	}
	for _, root := range roots.All() {
		l.paths = append(l.paths, filepath.Join(root, "overlay-layers", "layers.lock"), filepath.Join(root, "overlay-images", "images.lock"))
	}
	return l
}

// Close closes the files. The library must have closed its locks before.
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

// Held returns an error that names the lock that another process holds, and the process. If the
// library cannot take a lock, or lost one, it is fault.Unavailable.
func (l *Locks) Held(purpose int16) error {
	if err := l.Lost(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, path := range l.paths {
		f := l.files[path]
		if f == nil {
			var err error
			if f, err = os.Open(path); errors.Is(err, fs.ErrNotExist) {
				continue
			} else if err != nil {
				return unusable(err)
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
		if err := openable(path); err != nil {
			return unusable(err)
		}
	}
	return nil
}

// openable says why the library cannot open a lock file. It lets the library try: closing another
// descriptor of the file would release the lock.
func openable(path string) error {
	lock, err := lockfile.GetLockFile(path)
	if err != nil {
		return err
	}
	err = lock.TryRLock()
	if err == nil {
		lock.Unlock()
	}
	if failed := opening(err); failed != nil {
		return failed
	}
	return nil // else it is taken, and so it has been opened
}

// opening returns the innermost error of a file that could not be opened, or nil.
func opening(err error) *fs.PathError {
	var found *fs.PathError
	for errors.As(err, &found) {
		err = found.Err
	}
	return found
}

// unusable returns the error for a lock file that cannot be opened.
func unusable(err error) error {
	cure := ""
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EIO) {
		cure = "; repair the disk and mount it read-write"
	}
	return fmt.Errorf("the image store cannot be locked: %w%s: %w", err, cure, fault.Unavailable)
}

// Usable is the part of Held that does not depend on other processes: it reports whether the
// library can take locks.
func (l *Locks) Usable() error {
	if err := l.Held(ToRead); errors.Is(err, fault.Unavailable) {
		return err
	}
	return nil
}

// Panicked must be called with the cause of every recovered panic. If the panic left a lock locked,
// the store is fault.Unavailable until the process ends.
func (l *Locks) Panicked(cause any) {
	err, _ := cause.(error)
	failed := opening(err)
	if failed == nil || !slices.Contains(l.paths, failed.Path) {
		return
	}
	lost := fmt.Errorf("lock of the image store lost; repair the disk: crius then exits, for systemd to restart it: %w: %w", failed, fault.Unavailable)
	if l.lost.CompareAndSwap(nil, &lost) {
		close(l.losing)
	}
}

// Lost says why this process can no longer use the store. It never waits.
func (l *Locks) Lost() error {
	if lost := l.lost.Load(); lost != nil {
		return *lost
	}
	return nil
}

// Losing returns a channel that is closed when Lost becomes an error.
func (l *Locks) Losing() <-chan struct{} { return l.losing }

// Await waits until no other process holds a lock. If one holds it for LockTime, the error is
// fault.Timeout. It does not wait if the error is fault.Unavailable.
func (l *Locks) Await(ctx context.Context, purpose int16) error {
	held := l.Held(purpose)
	if held == nil {
		return nil
	}
	wait := trace.Waiting{Name: "wait for image store lock", For: "another process that uses the image store", Until: time.Now().Add(LockTime)}
	return trace.Wait(ctx, wait, func(ctx context.Context) error { return l.await(ctx, purpose, held) })
}

func (l *Locks) await(ctx context.Context, purpose int16, held error) error {
	const often = 50 * time.Millisecond
	limit := time.NewTimer(LockTime)
	defer limit.Stop()
	for held != nil {
		if errors.Is(held, fault.Unavailable) {
			return held
		}
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
