package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/poll"
)

// Ready says why no container can be created on this store: its disk, or that of the writable
// layers, is read-only or fails, or a lock was lost (fault.Unavailable), or another crius has
// become the owner (an *owner.TakenError). The text stays the same for as long as the cause does.
//
// A full disk is no reason: DiskPressure is the kubelet's answer to that. If a disk takes longer
// than readyWait, Ready returns the last answer; one attempt stays behind, and later calls add
// none.
func (s *Store) Ready(ctx context.Context) error {
	if err := s.holds.taken(); err != nil {
		return err
	}
	if err := s.locks.Lost(); err != nil {
		return err
	}
	if err := s.probe.look(ctx, s.failing); err != nil {
		return fmt.Errorf("storage is not writable: %w: %w", err, fault.Unavailable)
	}
	return nil
}

// AwaitLost waits until this process can no longer use the store, because containers/storage has
// panicked and never releases a lock (durable.Locks), but another process could, because the disks
// can be written. It returns the reason, or nil when ctx ends.
func (s *Store) AwaitLost(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-s.locks.Losing():
	}
	const often = time.Second
	poll.Until(ctx, often, func() bool { return s.failing(true) == nil })
	select {
	case <-ctx.Done():
		return nil
	default:
		return s.locks.Lost()
	}
}

// failing checks the disks. It makes a file only if due is set.
func (s *Store) failing(due bool) error {
	dirs := append(s.roots.All(), s.containersDir)
	slices.Sort(dirs)
	for _, dir := range slices.Compact(dirs) {
		if err := usable(dir, due); err != nil {
			return err
		}
	}
	return nil
}

// usable says why no file can be made in dir, which it makes if it is missing. A file system that
// has remounted itself read-only says so; whether one fails shows only in a write. The file that
// usable makes has no name, so nothing of it remains whatever happens.
func usable(dir string, write bool) error {
	var st unix.Statfs_t
	err := eintr.Retry(func() error { return unix.Statfs(dir, &st) })
	if errors.Is(err, fs.ErrNotExist) {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil && st.Flags&unix.ST_RDONLY != 0 {
		err = unix.EROFS
	}
	if err == nil && write {
		err = eintr.Retry(func() error { return makeNameless(dir) })
	}
	if err == nil || harmless(err) {
		return nil
	}
	return fmt.Errorf("%s: %w", dir, err)
}

func makeNameless(dir string) error {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// harmless reports whether err says nothing about the disk's health: the disk is full, its file
// system supports no files without a name, or this process has too many files open.
func harmless(err error) bool {
	return slices.ContainsFunc([]error{
		unix.ENOSPC, unix.EDQUOT, unix.EOPNOTSUPP, unix.EISDIR, unix.EMFILE, unix.ENFILE, unix.ENOMEM,
	}, func(target error) bool { return errors.Is(err, target) })
}

const (
	// readyWait is how long Ready waits for a disk, from the beginning of the attempt: kubelets ask
	// every few seconds.
	readyWait = time.Second
	// writeEvery is how long a disk that has taken a file counts as writable.
	writeEvery = 30 * time.Second
)

// probe runs one attempt at a time, and remembers the result of the last one.
type probe struct {
	mu      sync.Mutex
	current *attempt
	found   error     // result of the last attempt that ended
	written time.Time // when a file was last made
}

type attempt struct {
	done  chan struct{}
	began time.Time
}

// look begins an attempt, or joins the one in progress, and returns the last result.
func (p *probe) look(ctx context.Context, try func(due bool) error) error {
	a := p.start(try)
	timer := time.NewTimer(readyWait - time.Since(a.began))
	defer timer.Stop()
	select {
	case <-a.done:
	case <-timer.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.found
}

func (p *probe) start(try func(due bool) error) *attempt {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current != nil {
		return p.current
	}
	a := &attempt{done: make(chan struct{}), began: time.Now()}
	p.current = a
	due := p.found != nil || a.began.Sub(p.written) > writeEvery
	go func() {
		err := try(due)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.current, p.found = nil, err
		if due {
			p.written = time.Now()
		}
		close(a.done)
	}()
	return a
}
