// Package proc finds, kills and reaps the processes that runtimes leave to this
// server, and the processes of commands in containers.
package proc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/poll"
)

// A command may fork faster than it is killed. Processes beyond these bounds
// end with the container.
const (
	killRounds = 8
	maxTree    = 512 // processes held at a time
)

// Command is a command in a container that is a process of this machine.
type Command struct {
	PID    int
	Leader int // of its session, which may be another process: crun calls setsid in an intermediate process
}

// NoteLeader must be called before the process is reaped: a zombie is still in
// its session.
func (c *Command) NoteLeader() {
	var err error
	if c.Leader, err = unix.Getsid(c.PID); err != nil {
		c.Leader = c.PID
	}
}

// Kill kills everything that the command has started in the container of that
// id and cgroup: its descendants, and processes that left the tree because
// their parent died, which are still in its session. It repeats the search
// until it finds no new ones, or up to a bound. (A process with its own session
// and parent is a daemon of the container; it ends with the container.)
func (c *Command) Kill(ctx context.Context, id, group string) {
	isMember, err := cgroup.Membership(group)
	if err != nil {
		isMember = func(int) bool { return false }
	}
	KillTree(c.PID, func(pid int) bool { return IsOwnChild(pid) || isMember(pid) })
	killed := map[int]bool{}
	for range killRounds {
		pids, err := cgroup.Procs(group)
		if err != nil {
			slog.WarnContext(ctx, "cannot find orphaned exec processes", "container", id, "err", err)
			return
		}
		before := len(killed)
		for _, pid := range pids {
			if !killed[pid] && KillTree(pid, func(pid int) bool { return c.leads(pid) && isMember(pid) }) {
				killed[pid] = true
			}
		}
		if len(killed) == before {
			return
		}
	}
	slog.WarnContext(ctx, "cannot kill all exec processes, the remaining ones end with the container", "container", id, "killed", len(killed))
}

// leads reports whether a process is in the session of the command.
func (c *Command) leads(pid int) bool {
	sid, err := unix.Getsid(pid)
	return err == nil && sid == c.Leader
}

// KillTree kills a process that mine accepts, and its descendants, and reports
// whether there was one. It stops each before it lists its children, so that a
// process cannot fork unnoticed, and holds each by a pidfd before it checks it:
// the pid may have been reused since it was listed.
func KillTree(pid int, mine func(pid int) bool) bool {
	type process struct{ pid, fd int }
	var tree []process
	hold := func(pid int, mine func(pid int) bool) {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			return
		}
		if !mine(pid) {
			_ = unix.Close(fd)
			return
		}
		_ = unix.PidfdSendSignal(fd, unix.SIGSTOP, nil, 0)
		tree = append(tree, process{pid, fd})
	}
	hold(pid, mine)
	for i := 0; i < len(tree) && len(tree) < maxTree; i++ {
		parent := tree[i].pid
		for _, child := range Children(parent) {
			hold(child, func(pid int) bool { return parentOf(pid) == parent })
		}
	}
	for _, p := range tree {
		_ = unix.PidfdSendSignal(p.fd, unix.SIGKILL, nil, 0)
		_ = unix.Close(p.fd)
	}
	return len(tree) > 0
}

// Terminate sends SIGTERM to a process that mine accepts, and waits for its end
// until ctx ends.
func Terminate(ctx context.Context, pid int, mine func(pid int) bool) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if !mine(pid) || unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0) != nil {
		return
	}
	poll.Until(ctx, 5*time.Millisecond, func() bool { return Exiting(pid) })
}

// IsOwnChild reports whether a process is a child of this one. Its pid cannot
// be reused until it is reaped.
func IsOwnChild(pid int) bool { return parentOf(pid) == os.Getpid() }

// parentOf returns 0 if there is no such process.
func parentOf(pid int) int {
	parent, _ := statField(pid, 4)
	return int(parent)
}

// Children lists the children of all threads of pid.
func Children(pid int) []int {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	var pids []int
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the thread ended
		}
		for field := range strings.FieldsSeq(string(text)) {
			if child, err := strconv.Atoi(field); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// Exiting reports whether a process is in the kernel's do_exit, or gone.
func Exiting(pid int) bool {
	const flagExiting = 4 // PF_EXITING of linux/sched.h
	flags, err := statField(pid, 9)
	return errors.Is(err, os.ErrNotExist) || flags&flagExiting != 0
}

// statField returns a number in /proc/PID/stat, 0 with an error.
func statField(pid, n int) (uint64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	field, _ := wire.StatField(stat, n)
	return field, err
}
