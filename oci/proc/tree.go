// Package proc finds, kills and reaps the processes that runtimes leave to this server,
// and those of commands in containers.
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

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon/wire"
	"github.com/crius-run/crius/internal/cgroup"
)

// A command may fork faster than it is killed. What these leave ends with the
// container.
const (
	killRounds = 8
	maxTree    = 512 // of processes that are held at a time
)

// Command is a command in a container, which is a process of this machine.
type Command struct {
	PID    int
	Leader int // of its session, which is not always its own: crun makes it in a process between
}

// NoteLeader must come before the process is reaped: a zombie is still in its session.
func (c *Command) NoteLeader() {
	var err error
	if c.Leader, err = unix.Getsid(c.PID); err != nil {
		c.Leader = c.PID
	}
}

// Kill kills all that the command has started in the container of that id and cgroup:
// its descendants, and those that left the tree because their parent died, which the
// session still names. It looks for these until there are no new ones, or there have been
// enough rounds. (A process with a session and parent of its own making is a daemon that
// the container now has; it ends with the container.)
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

// leads tells whether a process is in the session of the command.
func (c *Command) leads(pid int) bool {
	sid, err := unix.Getsid(pid)
	return err == nil && sid == c.Leader
}

// KillTree kills a process that mine accepts, and its descendants, and tells
// whether there was one. Each is stopped before its children are listed, so that
// none is born behind our back, and each is held by a pidfd before it is looked at:
// what has a number now may be another process than the one that was listed.
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

// IsOwnChild tells whether a process is a child of this one, whose number nobody
// else can have until it is reaped.
func IsOwnChild(pid int) bool { return parentOf(pid) == os.Getpid() }

// parentOf is 0 if there is no such process.
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

// statField is a number in /proc/PID/stat, 0 with an error.
func statField(pid, n int) (uint64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	field, _ := wire.StatField(stat, n)
	return field, err
}
