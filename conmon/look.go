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

// lookTime is how long host paths may take to be looked at.
const lookTime = 5 * time.Second

// Look looks at host paths, and one floor into directories, in a process of its
// own, and tells which are not there: a path of a dead file server keeps whoever
// asks for it, and would keep a thread of the server for each that does. Such a
// path is fault.Timeout. The process is left behind then, until that server is
// back. Monitor is crius-conmon.
func Look(ctx context.Context, monitor string, paths []string) (absent []string, err error) {
	if len(paths) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lookTime, fmt.Errorf("it does not answer within %s: is its file server alive?: %w", lookTime, fault.Timeout))
	defer cancel()
	answers, theirs, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("look at host paths: %w", err)
	}
	defer answers.Close()
	looker, err := startLooking(monitor, paths, theirs)
	if err := errors.Join(err, theirs.Close()); err != nil {
		return nil, fmt.Errorf("look at host paths: %w", err)
	}
	defer func() {
		_ = looker.kill() // it has ended as a rule
		go func() {
			looker.reap()
			looker.close()
		}()
	}()
	defer context.AfterFunc(ctx, func() { _ = answers.SetReadDeadline(time.Unix(1, 0)) })()
	seen, err := io.ReadAll(answers)
	for i, path := range paths {
		switch {
		case i >= len(seen) && ctx.Err() != nil:
			return nil, fmt.Errorf("host path %s: %w", path, context.Cause(ctx))
		case i >= len(seen):
			return nil, fmt.Errorf("look at host path %s: %w", path, errors.Join(err, io.ErrUnexpectedEOF))
		case seen[i] == wire.Absent:
			absent = append(absent, path)
		}
	}
	return absent, nil
}

func startLooking(monitor string, paths []string, answers *os.File) (handle, error) {
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
		_, err = syscall.ForkExec(monitor, append([]string{monitor, wire.LookVerb}, paths...), &syscall.ProcAttr{
			Dir: "/", Env: own[:], Files: []uintptr{null.Fd(), fd, null.Fd()},
			Sys: &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd},
		})
	})
	if err := errors.Join(failed, err); err != nil {
		return handle{}, fmt.Errorf("execute %s: %w", monitor, err)
	}
	return newHandle(pidfd)
}
