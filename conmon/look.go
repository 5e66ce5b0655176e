package conmon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

const (
	// lookTime is how long looking at host paths may take.
	lookTime = 5 * time.Second
	// sourceTime is how long looking at the sources of a container's mounts may
	// take: a file server that is slower is useless for any container.
	sourceTime = 30 * time.Second
	// killTime is how long a killed process may take to end. One that sleeps in
	// an access to a dead file server does not end.
	killTime = time.Second
)

// HostPaths accesses paths of the node in a separate process for each call: an
// access to a path on a dead file server does not return, and would block a
// thread of crius each time. Such a path is fault.Timeout. Its process remains
// until the file server is back, and until then no other process accesses the
// path.
type HostPaths struct {
	Monitor string // crius-conmon

	mu     sync.Mutex
	killed map[string]*killed // by the path that the process was accessing
}

// killed is a process that was killed before it answered, because the time was
// up or the caller stopped waiting.
type killed struct {
	at     time.Time
	reaped chan struct{} // closed when it has ended
}

// Look accesses host paths and the entries of those that are directories, and returns
// the paths that do not exist.
func (p *HostPaths) Look(ctx context.Context, paths []string) (absent []string, err error) {
	answers, err := p.ask(ctx, wire.LookVerb, paths, lookTime)
	return missing(paths, answers), err
}

// Absent returns the host paths that do not exist. It does not read directories.
func (p *HostPaths) Absent(ctx context.Context, paths []string) (absent []string, err error) {
	answers, err := p.ask(ctx, wire.StatVerb, paths, sourceTime)
	return missing(paths, answers), err
}

// MakeDirs creates a directory, and its parents, at each host path that does not exist. It makes
// nothing at the end of a link: such a path is fault.Precondition.
func (p *HostPaths) MakeDirs(ctx context.Context, paths []string) error {
	answers, err := p.ask(ctx, wire.MakeVerb, paths, sourceTime)
	for i, code := range answers {
		switch errno := syscall.Errno(code); errno {
		case 0:
		case syscall.ENOENT:
			return fmt.Errorf("host path %s leads through a symbolic link to a path that does not exist: make that path, or correct the link: %w", paths[i], fault.Precondition)
		default:
			return fmt.Errorf("create missing directory %s: %w", paths[i], errno)
		}
	}
	return err
}

// relabelTime is how long it may take to relabel a volume: one with millions of files
// takes minutes.
const relabelTime = 30 * time.Minute

// Relabel gives host paths, and everything below them, an SELinux context. A directory
// that already has the context counts as relabelled and is left alone. A directory of
// the system such as /etc or /usr is fault.Invalid.
func (p *HostPaths) Relabel(ctx context.Context, label string, paths []string) error {
	answers, err := p.ask(ctx, wire.RelabelVerb+label, paths, relabelTime)
	for i, code := range answers {
		switch errno := syscall.Errno(code); errno {
		case 0:
		case wire.SystemPath:
			return fmt.Errorf("relabel %s for SELinux: refusing to relabel a system directory: %w", paths[i], fault.Invalid)
		default:
			return fmt.Errorf("relabel %s to %s for SELinux: %w", paths[i], label, errno)
		}
	}
	return err
}

// missing returns the paths that are known not to exist.
func missing(paths []string, answers []byte) (absent []string) {
	for i, code := range answers {
		if errno := syscall.Errno(code); errno == syscall.ENOENT || errno == syscall.ENOTDIR {
			absent = append(absent, paths[i])
		}
	}
	return absent
}

// ask has the monitor do verb with each path. Without an error there is an
// answer for each.
func (p *HostPaths) ask(ctx context.Context, verb string, paths []string, limit time.Duration) ([]byte, error) {
	if len(paths) == 0 {
		return nil, nil
	}
	if err := p.awaitKilled(ctx, paths); err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	answers, theirs, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("check host paths: %w", err)
	}
	defer answers.Close()
	asked, err := startAsking(p.Monitor, verb, paths, theirs)
	if err := errors.Join(err, theirs.Close()); err != nil {
		return nil, fmt.Errorf("check host paths: %w", err)
	}
	hung := ""
	defer func() {
		_ = asked.kill() // usually it has ended
		reaped := p.note(hung)
		go func() {
			asked.reap()
			asked.close()
			reaped()
		}()
	}()
	defer context.AfterFunc(limited, func() { _ = answers.SetReadDeadline(time.Unix(1, 0)) })()
	seen, err := io.ReadAll(answers)
	if len(seen) >= len(paths) {
		return seen, nil
	}
	path := paths[len(seen)]
	switch {
	case ctx.Err() != nil:
		hung, err = path, context.Cause(ctx)
	case limited.Err() != nil:
		hung = path
		return seen, fmt.Errorf("host path %s did not respond within %s: check that its file server is reachable: %w", path, limit, fault.Timeout)
	default:
		err = errors.Join(err, io.ErrUnexpectedEOF)
	}
	return seen, fmt.Errorf("check host path %s: %w", path, err)
}

// awaitKilled waits until the processes that were killed while they accessed
// one of paths have ended. One that outlives killTime hangs: that is
// fault.Timeout. One whose caller has just stopped waiting ends in
// milliseconds, and says nothing about the path.
func (p *HostPaths) awaitKilled(ctx context.Context, paths []string) error {
	for _, path := range paths {
		p.mu.Lock()
		k := p.killed[path]
		p.mu.Unlock()
		if k == nil {
			continue
		}
		select {
		case <-k.reaped:
		case <-ctx.Done():
			return fmt.Errorf("check host path %s: %w", path, context.Cause(ctx))
		case <-time.After(time.Until(k.at.Add(killTime))):
			return fmt.Errorf("host path %s has not responded since an earlier request: check that its file server is reachable: %w", path, fault.Timeout)
		}
	}
	return nil
}

// note records that a process was killed while it accessed path, until reaped
// is called. An empty path records nothing.
func (p *HostPaths) note(path string) (reaped func()) {
	if path == "" {
		return func() {}
	}
	k := &killed{at: time.Now(), reaped: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.killed == nil {
		p.killed = map[string]*killed{}
	}
	p.killed[path] = k
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.killed[path] == k {
			delete(p.killed, path)
		}
		close(k.reaped)
	}
}

func startAsking(monitor, verb string, paths []string, answers *os.File) (handle, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return handle{}, err
	}
	defer null.Close()
	own, pidfd := wire.Environ(), -1
	// Not by Fd, which would make a read of the pipe block a thread.
	raw, err := answers.SyscallConn()
	if err != nil {
		return handle{}, err
	}
	failed := raw.Control(func(fd uintptr) {
		_, err = syscall.ForkExec(monitor, append([]string{monitor, verb}, paths...), &syscall.ProcAttr{
			Dir: "/", Env: own[:], Files: []uintptr{null.Fd(), fd, null.Fd()},
			Sys: &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd},
		})
	})
	if err := errors.Join(failed, err); err != nil {
		return handle{}, fmt.Errorf("execute %s: %w", monitor, err)
	}
	return newHandle(pidfd)
}
