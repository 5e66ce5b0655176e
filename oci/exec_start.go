package oci

import (
	"cmp"
	"context"
	"fmt"
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
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/proc"
	"github.com/crius-run/crius/oci/stdio"
	"github.com/crius-run/crius/oci/tuning"
)

// begin starts a command.
func (t *cliTask) begin(ctx context.Context, c Command) (_ *execution, err error) {
	defer cgroup.Warm()()
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return nil, err
	}
	if err := t.paused(ctx); err != nil {
		return nil, err
	}
	process, err := commandProcess(t.ref, c, ownCPUs)
	if err != nil {
		return nil, err
	}
	s, pipes, err := stdio.Open(c.Stdin && !c.Terminal)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	defer pipes.Close()
	if err := pipes.Give(t.ref.owner(process)); err != nil {
		return nil, err
	}
	terminal, err := newTerminal(ctx, t.ref.Dir, a, c)
	if err != nil {
		return nil, err
	}
	defer terminal.Close()
	e := &execution{Session: s, hasten: a.quirks.lateSize && c.Terminal && c.Size != (stdio.Size{})}
	defer func() {
		if err != nil || !c.noted {
			e.forget()
		}
	}()
	if err = t.writeProcess(process, e); err != nil {
		return nil, err
	}
	err = trace.Do(ctx, "runtime exec", func(ctx context.Context) error {
		return t.execProcess(ctx, a, terminal, pipes, e)
	})
	if err != nil {
		pipes.Close()
		said := errorAlone(ctx, s.Said(terminal))
		return nil, t.execFailed(ctx, process, said, fmt.Errorf("%s exec (to run %.200q): %w", t.runtime.name, c.Args[0], describe(err, said)))
	}
	if err := s.UseTerminal(terminal); err != nil {
		t.killLate(ctx, e)
		return nil, fmt.Errorf("%s exec: %w", t.runtime.name, err)
	}
	if closed(t.client.Exited()) {
		// The command may have begun after all processes of the container were
		// killed, in a PID namespace that outlives them: it must not remain the
		// container's only process.
		t.killLate(ctx, e)
	}
	return e, nil
}

// commandProcess returns the container's own process with another command.
// runtime returns the CPUs that the runtime may use, and is called only if they
// matter.
func commandProcess(ref Ref, c Command, runtime func() tuning.Set) (*specs.Process, error) {
	process, err := readProcess[specs.Process](ref.Dir)
	if err != nil {
		return nil, err
	}
	if process.ExecCPUAffinity != nil {
		if present, err := presentCPUs(cgroup.ReadFile, ref.Cgroup); err == nil { // otherwise the runtime knows better
			process.ExecCPUAffinity = fitAffinity(*process.ExecCPUAffinity, present, runtime())
		}
	}
	process.Args = c.Args
	process.Terminal, process.ConsoleSize = c.Terminal, nil
	if c.Terminal && c.Size != (stdio.Size{}) {
		process.ConsoleSize = &specs.Box{Width: uint(c.Size.Width), Height: uint(c.Size.Height)}
	}
	hasTerm := slices.ContainsFunc(process.Env, func(e string) bool { return strings.HasPrefix(e, "TERM=") })
	if c.Terminal && !hasTerm {
		process.Env = append(process.Env, "TERM=xterm")
	}
	return process, checkProcess(process)
}

// newTerminal opens the terminal of a command. If the runtime stays in the
// foreground, the terminal becomes its own standard streams.
func newTerminal(ctx context.Context, dir string, a *Abilities, c Command) (stdio.Terminal, error) {
	switch {
	case !c.Terminal:
		return stdio.NoTerminal, nil
	case a.quirks.innerPID != "":
		return stdio.NewPTY(c.Size)
	}
	return stdio.NewConsole(ctx, dir)
}

// writeProcess writes the process for the runtime to start into a directory,
// which it records in e.
func (t *cliTask) writeProcess(process *specs.Process, e *execution) error {
	text, free, err := t.ref.encodeProcess(process)
	if err != nil {
		return err
	}
	defer free() // the file counts towards the pod's memory from then on
	if e.dir, err = os.MkdirTemp(t.ref.Dir, execDirsNow()); err != nil {
		return err
	}
	return os.WriteFile(processFileOf(e.dir), text, 0o600)
}

func processFileOf(dir string) string { return filepath.Join(dir, "process.json") }

// execProcess runs the runtime's exec, records in e which process it has
// started, and watches that process.
func (t *cliTask) execProcess(ctx context.Context, a *Abilities, terminal stdio.Terminal, pipes stdio.Pipes, e *execution) error {
	dir := e.dir
	processFile := processFileOf(dir)
	defer func() { _ = os.Remove(processFile) }() // the command has begun, and may run for long
	logFile := filepath.Join(dir, "log")
	defer t.runtime.relayLog(ctx, t.ref.ID, logFile)
	flags, streams := terminal.Offer(pipes)
	args := t.runtime.logged(a, logFile, append([]string{"exec", "--process", processFile, "--pid-file", pidFileOf(dir)}, flags...))
	run := t.execDetached
	if flag := a.quirks.innerPID; flag != "" {
		args = append(args, flag, innerPIDFileOf(dir))
		run = t.execForeground
	} else {
		args = append(args, "--detach")
	}
	argv := t.runtime.argv(a, append(args, t.ref.ID)...)
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // those who run it end it, when that does no harm
	cmd.Dir, cmd.Env = "/", append(inherit.Environ(), mountItselfIn(dir)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: streams != pipes} // of its standard input
	cmd.Stdin, cmd.Stdout, cmd.Stderr = streams[0], streams[1], streams[2]
	return run(ctx, cmd, e)
}

// execDetached runs a runtime that starts the command and exits before the
// command does anything.
func (t *cliTask) execDetached(ctx context.Context, cmd *exec.Cmd, e *execution) error {
	defer proc.Starting()()
	failed := inherit.Start(cmd.Start)
	if failed == nil {
		if e.hasten {
			hasten(cmd.Process.Pid)
		}
		t.ref.limits().LendOOMScore(t.PID(), cmd.Process.Pid)
		ended := endLate(ctx, cmd.Process.Pid)
		failed = cmd.Wait()
		ended()
	}
	var err error
	e.PID, err = readPid(pidFileOf(e.dir))
	switch {
	case ctx.Err() != nil && err == nil:
		t.killLate(ctx, e) // it started too late
		fallthrough
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case failed != nil:
		return failed
	case err != nil:
		return err
	}
	t.ref.limits().ShareOOMScore(t.PID(), e.PID)
	e.NoteLeader()
	if err := e.Watch(e.PID); err != nil {
		t.killLate(ctx, e)
		return err
	}
	return nil
}

// hasten gives a runtime a real-time priority until it exits, which its children do not
// inherit: the child needs far longer to become the command than the runtime to set the
// size of its terminal. If that is not permitted, as with real-time group scheduling, the
// command may see a terminal without a size.
func hasten(runtime int) {
	_ = unix.SchedSetAttr(runtime, &unix.SchedAttr{
		Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
	}, 0)
}

// endLate kills a runtime that is still running startTime after ctx has ended;
// the caller calls ended when the runtime has exited. The delay lets a runtime
// that is about to finish do so, because one killed half-way leaves things
// behind. If it hangs, the process that it is starting, in its own session, is
// killed with it.
func endLate(ctx context.Context, pid int) (ended func()) {
	done := make(chan struct{})
	go func() {
		select {
		case <-done:
			return
		case <-ctx.Done():
		}
		select {
		case <-done:
		case <-time.After(startTime):
			proc.KillTree(pid, proc.IsOwnChild)
		}
	}()
	return func() { close(done) }
}

// execForeground runs a runtime that stays as long as the command and exits
// with it: in a runtime sandbox the command is not a process of this machine. With
// --detach, runsc would only start itself without that flag and look for the
// pid file. It would give up silently after ten seconds, or if the command
// ended between two looks.
func (t *cliTask) execForeground(ctx context.Context, cmd *exec.Cmd, e *execution) error {
	if err := inherit.Start(cmd.Start); err != nil {
		return err
	}
	e.PID = cmd.Process.Pid
	if err := e.Watch(e.PID); err != nil {
		proc.KillTree(e.PID, proc.IsOwnChild)
		_ = cmd.Wait()
		return err
	}
	_ = cmd.Process.Release()
	if err := e.begun(ctx); err != nil {
		proc.KillTree(e.PID, proc.IsOwnChild)
		return err
	}
	if ctx.Err() != nil {
		t.killLate(ctx, e) // it started too late
		return context.Cause(ctx)
	}
	return nil
}

// begun waits until the runtime has written the command's pids or has exited,
// at most for startTime after ctx has ended.
func (e *execution) begun(ctx context.Context) error {
	const period = 2 * time.Millisecond
	waiting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(startTime, cancel) })()
	var err error
	poll.Until(waiting, period, func() bool {
		ended := closed(e.Ended()) // asked first: whatever it wrote before its end counts
		_, err = readPid(pidFileOf(e.dir))
		return err == nil || ended
	})
	if err == nil {
		e.innerPID, err = readPid(innerPIDFileOf(e.dir))
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case closed(e.Ended()):
		code, failed := e.ExitCode()
		return cmp.Or(failed, fmt.Errorf("exit status %d", code))
	}
	return err
}

// startTime is how long a runtime may take to exit by itself once its caller
// has stopped waiting. Starting a command takes tens of milliseconds.
const startTime = 300 * time.Millisecond

func readPid(file string) (int, error) {
	line, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("the runtime wrote no pid file: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(line)))
	if err == nil && pid <= 0 { // to kill(2) those mean several processes
		err = strconv.ErrRange
	}
	if err != nil {
		return 0, fmt.Errorf("the runtime's pid file contains no valid pid: %w", err)
	}
	return pid, nil
}
