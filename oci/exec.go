package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
)

// drainTime is how long output is still read after the process has ended while
// a child of it keeps the pipe open (containerd/containerd#7832).
const drainTime = 2 * time.Second

// Exec has the runtime start the command detached, with our pipes as its stdio.
// The runtime is gone again before the process has done anything; what remains
// is a child of this server (Reaper makes it a subreaper) whose exit the server
// sees by itself: no second monitor, no mount, no dbus call.
func (t *cliTask) Exec(ctx context.Context, args []string, timeout time.Duration) (*ExecResult, error) {
	process, err := execProcess(t.ref.Dir, args)
	if err != nil {
		return nil, err
	}
	// The time counts from the request, not from when the process runs.
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, timeout,
			fmt.Errorf("command did not end within %s and was killed: %w", timeout, fault.Timeout))
		defer cancel()
	}
	stdout, err := newCollector()
	if err != nil {
		return nil, err
	}
	defer stdout.close()
	stderr, err := newCollector()
	if err != nil {
		return nil, err
	}
	defer stderr.close()

	child, err := t.execDetached(ctx, process, stdout, stderr)
	if err != nil {
		return nil, err
	}
	// Not always its own: crun makes the session in a process between.
	session, err := unix.Getsid(child.Pid)
	if err != nil {
		return nil, fmt.Errorf("session of the command: %w", err)
	}
	ended := make(chan error, 1)
	var state *os.ProcessState
	go func() {
		var err error
		state, err = child.Wait()
		ended <- err
	}()
	select {
	case err = <-ended:
	case <-ctx.Done():
		t.killExec(ctx, child.Pid, session)
		<-ended
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("wait for command: %w", err)
	}
	return &ExecResult{Stdout: stdout.drain(), Stderr: stderr.drain(), ExitCode: exitCode(state)}, nil
}

// execProcess is the container's own process with another command. A terminal
// is the business of whoever attaches one.
func execProcess(bundle string, args []string) (*specs.Process, error) {
	spec, err := ReadSpec[specs.Spec](bundle)
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	process := spec.Process
	process.Args = args
	process.Terminal, process.ConsoleSize = false, nil
	return process, nil
}

// execDetached runs the runtime's exec and returns the process it started.
func (t *cliTask) execDetached(ctx context.Context, process *specs.Process, stdout, stderr *collector) (*os.Process, error) {
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(t.ref.Dir, "exec-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	text, err := json.Marshal(process)
	if err != nil {
		return nil, err
	}
	processFile, pidFile := filepath.Join(dir, "process.json"), filepath.Join(dir, "pid")
	if err := os.WriteFile(processFile, text, 0o600); err != nil {
		return nil, err
	}
	argv := t.runtime.argv(a.Path, "exec", "--detach", "--process", processFile, "--pid-file", pidFile, t.ref.ID)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	killGroup(cmd)
	cmd.Stdout, cmd.Stderr = stdout.take(), stderr.take()
	err = cmd.Run()
	stdout.given()
	stderr.given()
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, fmt.Errorf("%s exec: %w", t.runtime.name, describe(err, lastBytes(stderr.drain(), 4096)))
	}
	line, err := os.ReadFile(pidFile)
	if err != nil {
		return nil, fmt.Errorf("%s exec left no pid: %w", t.runtime.name, err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(line)))
	if err != nil {
		return nil, fmt.Errorf("%s exec left a pid file that holds no pid: %w", t.runtime.name, err)
	}
	return os.FindProcess(pid)
}

// collector is the reading end of one output stream of a process.
type collector struct {
	r, w *os.File
	got  bounded
	done chan struct{}
}

func newCollector() (*collector, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	c := &collector{r: r, w: w, got: bounded{max: MaxExecOutput}, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		_, _ = io.Copy(&c.got, r)
	}()
	return c, nil
}

// take is the end to hand to a process, given tells that it has been.
func (c *collector) take() *os.File { return c.w }
func (c *collector) given()         { _ = c.w.Close() }

// drain returns what was written, waiting for the end of the stream at most
// drainTime.
func (c *collector) drain() []byte {
	_ = c.r.SetReadDeadline(time.Now().Add(drainTime))
	<-c.done
	return c.got.Bytes()
}

func (c *collector) close() {
	_ = c.w.Close()
	_ = c.r.Close()
	<-c.done
}

func lastBytes(text []byte, n int) string {
	return strings.ToValidUTF8(string(text[max(0, len(text)-n):]), "?")
}

// exitCode is the shell's convention: 128 and the signal where there was one.
func exitCode(state *os.ProcessState) int32 {
	status, ok := state.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(state.ExitCode())
}

// killExec kills all that an exec has started: its descendants, and those that
// left the tree because their parent died, which the session still names. (A
// process with a session and parent of its own making is a daemon that the
// container now has; it ends with the container.)
func (t *cliTask) killExec(ctx context.Context, leader, session int) {
	killTree(leader)
	pids, err := cgroup.Procs(t.ref.Cgroup)
	if err != nil {
		slog.WarnContext(ctx, "orphans of a command cannot be found", "container", t.ref.ID, "err", err)
	}
	for _, pid := range pids {
		if sid, err := unix.Getsid(pid); err == nil && sid == session {
			killTree(pid)
		}
	}
}

// killTree kills pid and its descendants. Each is stopped before its children
// are listed, so that none is born behind our back.
func killTree(pid int) {
	tree := []int{pid}
	for i := 0; i < len(tree); i++ {
		_ = unix.Kill(tree[i], unix.SIGSTOP)
		for _, child := range children(tree[i]) {
			if !slices.Contains(tree, child) {
				tree = append(tree, child)
			}
		}
	}
	for _, pid := range tree {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
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

// Reaper reaps the orphans that nobody waits for.
type Reaper struct{}

// NewReaper makes this process the parent of the orphans among its
// descendants, which Exec relies on.
func NewReaper() (*Reaper, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become subreaper: %w", err)
	}
	return &Reaper{}, nil
}

// Run reaps until ctx ends. A zombie is left to whoever waits for it for a
// whole period; only then is it nobody's. Looking costs one small read, and
// only after a child has died.
func (*Reaper) Run(ctx context.Context, period time.Duration, childDied <-chan os.Signal) {
	seen := map[int]bool{}
	for {
		if len(seen) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-childDied:
			}
		}
		// A burst of deaths costs one look, and what was seen dead last time
		// has had its period.
		select {
		case <-ctx.Done():
			return
		case <-time.After(period):
		}
		seen = reapSeen(seen)
	}
}

// reapSeen reaps the zombies that were seen before and returns the new ones.
func reapSeen(before map[int]bool) map[int]bool {
	zombies := map[int]bool{}
	for _, pid := range children(os.Getpid()) {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err != nil || info.Signo != int32(unix.SIGCHLD) {
			continue // alive, or reaped by its owner
		}
		if !before[pid] {
			zombies[pid] = true
			continue
		}
		if _, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); errors.Is(err, unix.ECHILD) {
			continue
		}
	}
	return zombies
}
