package oci

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/mount"
)

// execDirs is how the names of execs' directories in a bundle begin.
const execDirs = "exec-"

// pidFileOf is the file in an exec's directory to which the runtime writes the pid.
func pidFileOf(dir string) string { return filepath.Join(dir, "pid") }

// sandboxPIDFileOf is the same for the pid inside a sandbox.
func sandboxPIDFileOf(dir string) string { return filepath.Join(dir, "guest") }

// endAbandoned ends the commands that a killed server has left in the container: those
// of ExecSync, and those that were about to be started. Nobody waits for them, and
// nobody else would keep their time limit. It takes abandonedTime at most, and only if
// a runtime is still starting one.
func (t *cliTask) endAbandoned(ctx context.Context) {
	dirs, err := filepath.Glob(filepath.Join(t.ref.Dir, execDirs+"*"))
	if err != nil {
		return // of a bad pattern alone
	}
	starting, cancel := context.WithTimeout(ctx, abandonedTime)
	defer cancel()
	for _, dir := range dirs {
		if e := t.abandoned(starting, dir); e != nil {
			slog.InfoContext(ctx, "ending command of an earlier server", "container", t.ref.ID, "pid", e.pid)
			t.killExec(ctx, e)
		}
		if err := mount.RemoveAll(dir); err != nil {
			slog.WarnContext(ctx, "cannot remove files of a command of an earlier server", "container", t.ref.ID, "err", err)
		}
	}
}

// abandonedTime is what runtimes get that are still starting commands of a container.
const abandonedTime = 2 * time.Second

// abandoned is the command to which an exec's directory belongs, nil if it does not
// run before ctx ends.
func (t *cliTask) abandoned(ctx context.Context, dir string) *execution {
	e := &execution{}
	again := time.NewTicker(abandonedTime / 100)
	defer again.Stop()
	for {
		var err error
		if e.pid, err = readPid(pidFileOf(dir)); err == nil {
			break
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil
		}
	}
	e.sandboxPID, _ = readPid(sandboxPIDFileOf(dir)) // outside of sandboxes there is none
	if !t.hasStarted(e, dir) {
		return nil
	}
	e.noteLeader()
	return e
}

// hasStarted tells whether a pid is still that of the command: another process that
// has got the number began after the runtime had written it down.
func (t *cliTask) hasStarted(e *execution, dir string) bool {
	written, err := os.Stat(pidFileOf(dir))
	if err != nil {
		return false
	}
	isMember, err := cgroup.Membership(t.ref.Cgroup)
	if err != nil || e.sandboxPID == 0 && !isMember(e.pid) {
		return false
	}
	process, err := wire.Find(e.pid)
	var now unix.Timespec
	if err != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return false
	}
	const tick = 10 * time.Millisecond // USER_HZ is 100 for every program
	began := time.Now().Add(time.Duration(process.StartTime)*tick - time.Duration(now.Nano()))
	return began.Before(written.ModTime().Add(time.Second))
}
