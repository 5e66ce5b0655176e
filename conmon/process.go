package conmon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/fault"
)

// Process names a process by its pid and its start time, so that a later
// process with the same pid is never taken for it.
type Process = wire.Process

// Signal sends sig to exactly this process. It is not an error if the process
// has exited.
func Signal(p Process, sig unix.Signal) error {
	fd, err := openPidfd(p)
	if err == nil {
		err = unix.PidfdSendSignal(fd, sig, nil, 0)
		_ = unix.Close(fd)
	}
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// Alive reports whether the process exists and is not a zombie. If descriptors
// or memory are used up it cannot tell, and returns true.
func Alive(p Process) bool {
	fd, err := openPidfd(p)
	if err != nil {
		return !errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	return !dead(fd)
}

// Await returns when p has exited, with nil, or when ctx ends. Another error
// means that p cannot be watched.
func Await(ctx context.Context, p Process) error {
	fd, err := openPidfd(p)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	var h handle
	if err == nil {
		h, err = newHandle(fd)
	}
	if err != nil {
		return fmt.Errorf("watch process %d: %w", p.PID, err)
	}
	defer h.close()
	defer context.AfterFunc(ctx, h.close)()
	h.await()
	return context.Cause(ctx)
}

// OpenPIDNamespace opens the PID namespace of p. The file stays that
// namespace's even if p exits and its pid is reused. The error is
// fault.Precondition if p has exited.
func OpenPIDNamespace(p Process) (*os.File, error) {
	file, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", p.PID))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err != nil || !Alive(p) {
		file.Close()
		return nil, fmt.Errorf("process %d has ended: %w", p.PID, fault.Precondition)
	}
	return file, nil
}

// dead reports whether the process of a pidfd has died, and perhaps been
// reaped: then the descriptor becomes readable.
func dead(pidfd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}

// openPidfd returns unix.ESRCH if p has exited.
func openPidfd(p Process) (int, error) {
	if p.PID <= 0 {
		return -1, unix.ESRCH
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // the number is a thread's of another process
		return -1, unix.ESRCH
	}
	if err != nil {
		return -1, err
	}
	now, err := wire.Find(p.PID)
	if errors.Is(err, unix.ENOENT) || err == nil && now != p {
		err = unix.ESRCH
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// handle refers to a monitor. Its pidfd is in the Go runtime's poller, so that
// waiting costs a goroutine and no thread.
type handle struct{ file *os.File }

func newHandle(pidfd int) (handle, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil {
		_ = unix.Close(pidfd)
		return handle{}, err
	}
	return handle{os.NewFile(uintptr(pidfd), "pidfd")}, nil
}

func (h handle) kill() error {
	if h.file == nil {
		return unix.ESRCH
	}
	raw, err := h.file.SyscallConn()
	if err != nil {
		return err
	}
	failed := raw.Control(func(fd uintptr) { err = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
	return errors.Join(failed, err)
}

// await waits until the process is dead, or the handle is closed.
func (h handle) await() {
	raw, err := h.file.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(fd uintptr) bool { return dead(int(fd)) })
}

// reap waits until the process is dead and collects it if it is a child of this
// process.
func (h handle) reap() {
	if h.file == nil {
		return
	}
	raw, err := h.file.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(fd uintptr) bool {
		return dead(int(fd)) && unix.Waitid(unix.P_PIDFD, int(fd), nil, unix.WEXITED|unix.WNOHANG, nil) != unix.EINTR
	})
}

func (h handle) close() {
	if h.file != nil {
		_ = h.file.Close()
	}
}
