package oci

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
	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/stdio"
)

// reapTime is how long a killed command is waited for. One that sleeps
// uninterruptibly dies when it can.
const reapTime = 300 * time.Millisecond

// Limits of what is kept of the output of Execs besides MaxExecOutput.
const (
	freeOutput     = 64 << 10 // bytes of each stream that are kept in any case
	maxOutputInSum = 32 << 20 // bytes beyond these, of all calls at once
)

func (t *cliTask) Exec(ctx context.Context, args []string, timeout time.Duration) (*ExecResult, error) {
	return execSync(ctx, t, t.runtime.output, args, timeout)
}

// execer starts commands in a container, and kills them.
type execer interface {
	exec(ctx context.Context, c Command) (*execution, error)
	killExec(ctx context.Context, e *execution)
}

// execSync is Open with somebody who reads the output and waits for the end. What
// is kept of the output is taken from budget until ctx ends: an RPC's ends when
// its answer has been sent.
func execSync(ctx context.Context, t execer, budget *capture.Budget, args []string, timeout time.Duration) (*ExecResult, error) {
	kept := budget.Part(MaxExecOutput - 2*freeOutput)
	rpc := ctx
	defer func() { context.AfterFunc(rpc, kept.Return) }()
	// The time counts from the request, not from when the process runs.
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, timeout,
			fmt.Errorf("command did not end within %s and was killed: %w", timeout, fault.Timeout))
		defer cancel()
	}
	c, err := t.exec(ctx, Command{Args: args, noted: true})
	if program, ok := errors.AsType[*ProgramError](err); ok {
		return program.result(), nil
	}
	if err != nil {
		return nil, err
	}
	defer c.forget()
	trace.Leave(ctx) // the command may take as long as it likes
	stdout := capture.Head{Max: MaxExecOutput, Budget: kept, Free: freeOutput}
	stderr := capture.Head{Max: MaxExecOutput, Budget: kept, Free: freeOutput}
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_ = c.Output(ctx, &stdout, &stderr) // neither refuses anything
	}()
	defer func() {
		c.Close()
		<-copied
	}()
	select {
	case <-c.Ended():
	case <-ctx.Done():
		_ = trace.Do(ctx, "kill command", func(ctx context.Context) error {
			t.killExec(ctx, c)
			return nil
		})
		select {
		case <-c.Ended():
		case <-time.After(reapTime):
		}
		return nil, context.Cause(ctx)
	}
	<-copied
	code, err := c.ExitCode()
	if err != nil {
		return nil, err
	}
	return &ExecResult{Stdout: stdout.Bytes(), Stderr: stderr.Bytes(), ExitCode: code}, nil
}

// Open has the runtime start the command detached, with our pipes or a terminal
// of ours as its stdio. The runtime is gone again before the process has done
// anything; what remains is a child of this server (Reaper makes it a subreaper)
// whose exit the server sees by itself: no second monitor, no mount, no dbus call.
func (t *cliTask) Open(ctx context.Context, c Command) (*stdio.Session, error) {
	child, err := t.exec(ctx, c)
	if err != nil {
		return nil, err
	}
	return child.Session, nil
}

// exec: a sandbox's command has no process here that dies with the runtime, and no
// name until the runtime has told its pid.
func (t *cliTask) exec(ctx context.Context, c Command) (*execution, error) {
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return nil, err
	}
	if a.quirks.sandboxPID == "" {
		return t.begin(ctx, c)
	}
	return beginWhole(ctx, func(ctx context.Context) (*execution, error) { return t.begin(ctx, c) },
		func(e *execution) { t.killLate(ctx, e) })
}

// beginWhole has begin do its work to the end although ctx ends, within
// verbTimeout: if it were stopped half-way, it might leave a command that nobody
// can kill because nobody knows it. One that comes too late is killed and let go of.
func beginWhole(ctx context.Context, begin func(context.Context) (*execution, error), kill func(*execution)) (*execution, error) {
	type result struct {
		e   *execution
		err error
	}
	begun := make(chan result, 1)
	go func() {
		whole, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), verbTimeout,
			fmt.Errorf("command was not started within %s: %w", verbTimeout, fault.Timeout))
		defer cancel()
		e, err := begin(whole)
		begun <- result{e, err}
	}()
	select {
	case r := <-begun:
		return r.e, r.err
	case <-ctx.Done():
		go func() {
			if r := <-begun; r.err == nil {
				kill(r.e)
				r.e.Close()
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// execution is a command that runs.
type execution struct {
	*stdio.Session
	pid        int
	leader     int    // of its session, which is not always its own: crun makes it in a process between
	sandboxPID int    // its pid inside a sandbox: then the other one is that of a helper; 0: it is in none
	dir        string // see Command.noted
	kill       func() // where no pid serves
}

// forget removes the note for the next server.
func (e *execution) forget() {
	if e.dir != "" {
		_ = mount.RemoveAll(e.dir) // else it goes with the container
	}
}

// noteLeader must come before the process is reaped: a zombie is still in its session.
func (e *execution) noteLeader() {
	var err error
	if e.leader, err = unix.Getsid(e.pid); err != nil {
		e.leader = e.pid
	}
}

// killLate kills a command that nobody waits for any more. It may have ended
// already and left others.
func (t *cliTask) killLate(ctx context.Context, e *execution) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), verbTimeout)
	defer cancel()
	if e.leader == 0 {
		e.noteLeader()
	}
	t.killExec(ctx, e)
	_ = e.Watch(e.pid) // else the Reaper reaps it, later
}

// killExec kills all that an exec has started: its descendants, and those that
// left the tree because their parent died, which the session still names. (A
// process with a session and parent of its own making is a daemon that the
// container now has; it ends with the container.)
func (t *cliTask) killExec(ctx context.Context, e *execution) {
	if e.sandboxPID != 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), verbTimeout)
		defer cancel()
		t.killInSandbox(ctx, e.sandboxPID)
		killTree(e.pid, isOwnChild)
		return
	}
	killCommand(ctx, t.ref, e)
}

// A command may fork faster than it is killed. What these leave ends with the
// container.
const (
	killRounds = 8
	maxTree    = 512 // of processes that are held at a time
)

// killCommand is that for a command which is a process of this machine. It looks
// for its orphans until there are no new ones, or there have been enough rounds.
func killCommand(ctx context.Context, ref Ref, e *execution) {
	isMember, err := cgroup.Membership(ref.Cgroup)
	if err != nil {
		isMember = func(int) bool { return false }
	}
	killTree(e.pid, func(pid int) bool { return isOwnChild(pid) || isMember(pid) })
	killed := map[int]bool{}
	for range killRounds {
		pids, err := cgroup.Procs(ref.Cgroup)
		if err != nil {
			slog.WarnContext(ctx, "cannot find orphaned exec processes", "container", ref.ID, "err", err)
			return
		}
		before := len(killed)
		for _, pid := range pids {
			if !killed[pid] && killTree(pid, func(pid int) bool { return e.leads(pid) && isMember(pid) }) {
				killed[pid] = true
			}
		}
		if len(killed) == before {
			return
		}
	}
	slog.WarnContext(ctx, "cannot kill all exec processes, the remaining ones end with the container", "container", ref.ID, "killed", len(killed))
}

// leads tells whether a process is in the session of the command.
func (e *execution) leads(pid int) bool {
	sid, err := unix.Getsid(pid)
	return err == nil && sid == e.leader
}

// killTree kills a process that mine accepts, and its descendants, and tells
// whether there was one. Each is stopped before its children are listed, so that
// none is born behind our back, and each is held by a pidfd before it is looked at:
// what has a number now may be another process than the one that was listed.
func killTree(pid int, mine func(pid int) bool) bool {
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
		for _, child := range children(parent) {
			hold(child, func(pid int) bool { return parentOf(pid) == parent })
		}
	}
	for _, p := range tree {
		_ = unix.PidfdSendSignal(p.fd, unix.SIGKILL, nil, 0)
		_ = unix.Close(p.fd)
	}
	return len(tree) > 0
}

// isOwnChild tells whether a process is a child of this one, whose number nobody
// else can have until it is reaped.
func isOwnChild(pid int) bool { return parentOf(pid) == os.Getpid() }

// parentOf is 0 if there is no such process.
func parentOf(pid int) int {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	parent, _ := wire.StatField(stat, 4)
	return int(parent)
}

// children lists the children of all threads of pid.
func children(pid int) []int {
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
