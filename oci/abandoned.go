package oci

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/oci/proc"
)

// Prefixes of the names of commands' directories in a bundle.
const (
	execDirs    = "exec-"    // of ExecSync commands, and of commands that are being started
	sessionDirs = "session-" // of sessions with a shim: their FIFOs
)

// execIDOf returns the id by which a shim knows the command.
func execIDOf(dir string) string {
	return strings.TrimPrefix(strings.TrimPrefix(filepath.Base(dir), execDirs), sessionDirs)
}

// pidFileOf returns the file in an exec's directory to which the runtime writes
// the pid.
func pidFileOf(dir string) string { return filepath.Join(dir, "pid") }

// innerPIDFileOf is the same for the pid inside a runtime sandbox.
func innerPIDFileOf(dir string) string { return filepath.Join(dir, "guest") }

// EndAbandoned takes at most abandonedTime to find the commands, and only if a
// runtime is still starting one.
func (t *cliTask) EndAbandoned(ctx context.Context) func(context.Context) error {
	starting, cancel := context.WithTimeout(ctx, abandonedTime)
	defer cancel()
	_, _ = endEach(ctx, t.ref.ID, t.ref.abandonedDirs(), func(dir string) error { // the callback returns no error
		if e := t.abandoned(starting, dir); e != nil {
			slog.InfoContext(ctx, "killing exec process left by a previous server", "container", t.ref.ID, "pid", e.PID)
			t.killExec(ctx, e)
		}
		return nil
	})
	return nil
}

// EndAbandoned relies on the shim to know whether a command still runs.
func (t *shimTask) EndAbandoned(ctx context.Context) func(context.Context) error {
	for _, dir := range t.ref.dirs(sessionDirs) {
		go t.leaveSession(context.WithoutCancel(ctx), dir)
	}
	left, err := t.endCommands(ctx, t.ref.abandonedDirs())
	if err == nil {
		return nil
	}
	slog.WarnContext(ctx, "cannot kill exec processes left by a previous server, retrying", "container", t.ref.ID, "err", err)
	return func(ctx context.Context) error {
		left, err = t.endCommands(ctx, left)
		return err
	}
}

// leaveSession does for a session of an earlier server what its client's leaving would have done: the input of the
// command ends, or its terminal hangs up, for which it is enough elsewhere that the server has died. The command may
// continue, and is deleted in the shim when it has ended. One that was never started does not end by itself. A shim
// that hangs is asked again for as long as the container runs.
func (t *shimTask) leaveSession(ctx context.Context, dir string) {
	x := &shimExec{task: t, dir: dir, process: shim.Process{ID: t.ref.ID, Exec: execIDOf(dir)}}
	var state shim.State
	var err error
	poll.Until(ctx, abandonedTime, func() bool {
		x.client, state, err = t.awaitStart(ctx, x.process)
		return err == nil || errors.Is(err, fault.NotFound) || closed(t.client.Exited())
	})
	switch {
	case err != nil:
		_ = mount.RemoveAll(dir) // otherwise it goes with the container
		return
	case !state.Started:
		x.client.Close()
		_, _ = t.endCommands(ctx, []string{dir}) // what is left goes with the container
		return
	}
	x.wait(ctx)
	x.leave(ctx)
	<-x.ended
	x.forget(ctx)
}

// awaitStart waits, at most for abandonedTime, until the shim has started a command, and returns a connection to the
// shim and the state of the command.
func (t *shimTask) awaitStart(ctx context.Context, process shim.Process) (client *shim.Client, state shim.State, err error) {
	answering, cancel := context.WithTimeout(ctx, lastTime)
	defer cancel()
	if client, err = t.record.Dial(answering); err != nil {
		return nil, state, err
	}
	starting, cancel := context.WithTimeout(answering, abandonedTime)
	defer cancel()
	poll.Until(starting, abandonedPace, func() bool {
		state, err = client.State(answering, process)
		return err != nil || state.Started
	})
	if err != nil {
		client.Close()
	}
	return client, state, err
}

// leave ends the input of a command, and tells it that its client has left.
func (x *shimExec) leave(ctx context.Context) {
	has := func(fifo string) bool { return unix.Access(filepath.Join(x.dir, fifo), unix.F_OK) == nil }
	terminal := !has("err")
	if !terminal && has("in") {
		reading, cancel := context.WithTimeout(ctx, lastTime)
		defer cancel()
		poll.Until(reading, abandonedPace, func() bool { return closed(x.ended) || shim.Unread(filepath.Join(x.dir, "in")) == 0 })
		ending, cancel := context.WithTimeout(ctx, lastTime)
		defer cancel()
		_ = x.client.CloseStdin(ending, x.process)
	}
	x.hangUp(ctx, terminal)
}

// endCommands gives the shim lastTime for all commands, including abandonedTime
// for those that it is still starting. It returns the directories of commands
// that it did not end.
func (t *shimTask) endCommands(ctx context.Context, dirs []string) (left []string, err error) {
	answering, cancel := context.WithTimeout(ctx, lastTime)
	defer cancel()
	starting, cancel := context.WithTimeout(ctx, abandonedTime)
	defer cancel()
	return endEach(ctx, t.ref.ID, dirs, func(dir string) error {
		return t.endCommand(answering, starting, execIDOf(dir), dirs)
	})
}

// endCommand kills a command, with all of its descendants that are within
// reach, and deletes it in the shim. A shim that is asked to delete a command
// that it is just starting may start it nevertheless: endCommand waits for that
// until the context starting ends, and looks for the process once the shim has
// deleted the command. earlier are the directories of all commands of earlier
// servers.
func (t *shimTask) endCommand(ctx, starting context.Context, exec string, earlier []string) error {
	process := shim.Process{ID: t.ref.ID, Exec: exec}
	client, err := t.record.Dial(ctx)
	if errors.Is(err, fault.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer client.Close()
	var state shim.State
	poll.Until(starting, abandonedPace, func() bool {
		state, err = client.State(ctx, process)
		return err != nil || state.Started
	})
	if err == nil {
		slog.InfoContext(ctx, "killing exec process left by a previous server", "container", t.ref.ID, "pid", state.PID)
		found := state.Started && shim.CheckPID(state.PID) == nil
		if found && !state.Ended && !t.record.Sandboxed {
			t.killByPID(ctx, state.PID)
		}
		_ = client.Kill(ctx, process, unix.SIGKILL, false) // it may have ended by now
		if state.Started {
			_, _ = client.Wait(ctx, process)
		}
		if err = client.Delete(ctx, process); err == nil && found {
			return nil
		}
	}
	if err != nil && !errors.Is(err, fault.NotFound) {
		return err
	}
	if t.record.Sandboxed {
		return nil
	}
	return t.killUnknown(ctx, client, earlier)
}

func (t *shimTask) killByPID(ctx context.Context, pid int) {
	c := &proc.Command{PID: pid}
	c.NoteLeader()
	c.Kill(ctx, t.ref.ID, t.ref.Cgroup)
}

// killUnknown kills exec processes that the shim does not know. A shim kills
// its runtime when the connection that requested an exec is lost, but the
// runtime may have started the process by then. Such a process is a child of
// the shim, whereas orphans of the container are children of its init. In the
// node's PID namespace the two cannot be distinguished, so such a process keeps
// running. An error means that they cannot be identified now.
func (t *shimTask) killUnknown(ctx context.Context, client *shim.Client, earlier []string) error {
	own, ownErr := os.Stat("/proc/self/ns/pid")
	theirs, err := os.Stat(fmt.Sprintf("/proc/%d/ns/pid", t.PID()))
	if ownErr != nil || err != nil || os.SameFile(own, theirs) {
		return nil //nolint:nilerr // the container has ended, or such a command is out of reach
	}
	isMember, err := cgroup.Membership(t.ref.Cgroup)
	if err != nil {
		return nil //nolint:nilerr // the container has ended
	}
	parent, err := client.Shim(ctx, t.ref.ID)
	if err != nil {
		return err
	}
	strangers := proc.Children(parent.PID) // first: the directory of a command is made before the process starts
	known := map[int]bool{t.PID(): true}
	for _, dir := range slices.Concat(t.ref.dirs(execDirs), t.ref.dirs(sessionDirs)) {
		if slices.Contains(earlier, dir) {
			continue
		}
		state, err := client.State(ctx, shim.Process{ID: t.ref.ID, Exec: execIDOf(dir)})
		switch {
		case errors.Is(err, fault.NotFound):
			continue
		case err != nil:
			return err
		case shim.CheckPID(state.PID) != nil:
			return fmt.Errorf("exec %s is still being started: %w", execIDOf(dir), fault.Unavailable)
		}
		known[state.PID] = true
	}
	for _, pid := range strangers {
		if !known[pid] && isMember(pid) {
			t.killByPID(ctx, pid)
		}
	}
	return nil
}

// abandonedDirs returns the directories of commands of earlier servers. It must
// run before this server starts any command.
func (r Ref) abandonedDirs() []string { return r.dirs(execDirs) }

// dirs returns the bundle's directories whose names have the prefix.
func (r Ref) dirs(prefix string) []string {
	found, _ := filepath.Glob(filepath.Join(r.Dir, prefix+"*")) // the pattern is well-formed
	return found
}

// endEach calls end for each command's directory, then removes it. If end fails
// the directory stays.
func endEach(ctx context.Context, id string, dirs []string, end func(dir string) error) (left []string, err error) {
	for _, dir := range dirs {
		if failed := end(dir); failed != nil {
			left = append(left, dir)
			err = errors.Join(err, fmt.Errorf("exec %s: %w", execIDOf(dir), failed))
			continue
		}
		if err := mount.RemoveAll(dir); err != nil {
			slog.WarnContext(ctx, "cannot remove files of an exec process left by a previous server", "container", id, "err", err)
		}
	}
	return left, err
}

// abandonedTime is how long runtimes get that are still starting commands of a
// container; it is also the interval between checks.
var abandonedTime = 2 * time.Second

const abandonedPace = 20 * time.Millisecond

// abandoned returns the command to which an exec's directory belongs, or nil if
// it does not run before ctx ends.
func (t *cliTask) abandoned(ctx context.Context, dir string) *execution {
	e := &execution{}
	written := poll.Until(ctx, abandonedPace, func() bool {
		var err error
		e.PID, err = readPid(pidFileOf(dir))
		return err == nil
	})
	if !written {
		return nil
	}
	e.innerPID, _ = readPid(innerPIDFileOf(dir)) // outside of runtime sandboxes there is none
	e.left = true
	if !e.hasStarted(t.ref, dir) {
		return nil
	}
	e.NoteLeader()
	return e
}

// hasStarted reports whether a pid is still that of the command: if the number
// was reused, the new process began after the runtime had written it down. The
// stand-in of a command in a runtime sandbox is not in the container's cgroup.
func (e *execution) hasStarted(ref Ref, dir string) bool {
	written, err := os.Stat(pidFileOf(dir))
	if err != nil {
		return false
	}
	isMember, err := cgroup.Membership(ref.Cgroup)
	if err != nil || e.innerPID == 0 && ref.Holder == "" && !isMember(e.PID) {
		return false
	}
	process, err := wire.Find(e.PID)
	if err != nil {
		return false
	}
	const tick = 10 * time.Millisecond // USER_HZ is 100 for every program
	began := bootedBefore(dir).Add(time.Duration(process.StartTime) * tick)
	return began.Before(written.ModTime().Add(time.Second))
}

// execDirsNow is execDirs, and when this machine was booted according to its
// clock as it is set now. The next server may find the clock set to another time.
func execDirsNow() string { return fmt.Sprintf("%s%d-", execDirs, booted().UnixMilli()) }

// bootedBefore returns when this machine was booted according to its clock as it
// was set when an exec's directory was made. Earlier releases did not note that.
func bootedBefore(dir string) time.Time {
	id := execIDOf(dir)
	ms, err := strconv.ParseInt(id[:max(strings.LastIndexByte(id, '-'), 0)], 10, 64) // negative if the clock was before 1970
	if err != nil {
		return booted()
	}
	return time.UnixMilli(ms)
}

func booted() time.Time {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // never fails
	return time.Now().Add(-time.Duration(now.Nano()))
}
