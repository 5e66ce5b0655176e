package conmon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

const (
	// lookTime is how long it may take to look at host paths.
	lookTime = 5 * time.Second
	// sourceTime is how long the sources of a container's mounts may take: a file
	// server that is slower serves no container.
	sourceTime = 30 * time.Second
)

// Look looks at host paths, and one floor into directories, and tells which are
// not there. It and its neighbours do that in a process of its own: a path of a
// dead file server keeps whoever asks for it, and would keep a thread of the
// server for each that does. Such a path is fault.Timeout. The process is left
// behind then, until that server is back. Monitor is crius-conmon.
func Look(ctx context.Context, monitor string, paths []string) (absent []string, err error) {
	answers, err := ask(ctx, monitor, wire.LookVerb, paths, lookTime)
	return missing(paths, answers), err
}

// Absent tells which host paths are not there, and no more of them.
func Absent(ctx context.Context, monitor string, paths []string) (absent []string, err error) {
	answers, err := ask(ctx, monitor, wire.StatVerb, paths, sourceTime)
	return missing(paths, answers), err
}

// MakeDirs makes directories of host paths at which there is nothing, and those
// above them.
func MakeDirs(ctx context.Context, monitor string, paths []string) error {
	answers, err := ask(ctx, monitor, wire.MakeVerb, paths, sourceTime)
	for i, code := range answers {
		if code != 0 {
			return fmt.Errorf("create missing directory %s: %w", paths[i], syscall.Errno(code))
		}
	}
	return err
}

// relabelTime is how long it may take to relabel a volume: one with millions of files
// takes minutes.
const relabelTime = 30 * time.Minute

// Relabel gives files and directories, and all below these, an SELinux context. One
// whose directory has it already has been relabelled before, and is left alone. A path
// that is the system's (/etc, /usr) is fault.Invalid.
func Relabel(ctx context.Context, monitor, label string, paths []string) error {
	answers, err := ask(ctx, monitor, wire.RelabelVerb+label, paths, relabelTime)
	for i, code := range answers {
		switch errno := syscall.Errno(code); errno {
		case 0:
		case wire.SystemPath:
			return fmt.Errorf("relabel %s for SELinux: the path is the system's, and no pod may have it for itself: %w", paths[i], fault.Invalid)
		default:
			return fmt.Errorf("relabel %s to %s for SELinux: %w", paths[i], label, errno)
		}
	}
	return err
}

// missing are the paths that are plainly not there.
func missing(paths []string, answers []byte) (absent []string) {
	for i, code := range answers {
		if errno := syscall.Errno(code); errno == syscall.ENOENT || errno == syscall.ENOTDIR {
			absent = append(absent, paths[i])
		}
	}
	return absent
}

// ask has monitor do verb with each path. Without an error there is an answer of
// each.
func ask(ctx context.Context, monitor, verb string, paths []string, limit time.Duration) ([]byte, error) {
	if len(paths) == 0 {
		return nil, nil
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	answers, theirs, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("look at host paths: %w", err)
	}
	defer answers.Close()
	asked, err := startAsking(monitor, verb, paths, theirs)
	if err := errors.Join(err, theirs.Close()); err != nil {
		return nil, fmt.Errorf("look at host paths: %w", err)
	}
	defer func() {
		_ = asked.kill() // it has ended as a rule
		go func() {
			asked.reap()
			asked.close()
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
		err = context.Cause(ctx)
	case limited.Err() != nil:
		return seen, fmt.Errorf("host path %s does not answer within %s: is its file server alive?: %w", path, limit, fault.Timeout)
	default:
		err = errors.Join(err, io.ErrUnexpectedEOF)
	}
	return seen, fmt.Errorf("look at host path %s: %w", path, err)
}

func startAsking(monitor, verb string, paths []string, answers *os.File) (handle, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return handle{}, err
	}
	defer null.Close()
	own, pidfd := wire.Environ(), -1
	// Not by Fd, which would make the pipe wait in a thread.
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
