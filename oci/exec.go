package oci

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/proc"
	"github.com/crius-run/crius/oci/stdio"
)

// reapTime is how long to wait for a killed command. One that sleeps
// uninterruptibly dies when it can.
const reapTime = 300 * time.Millisecond

// Limits on the output of Execs that is kept, besides MaxExecOutput.
const (
	freeOutput     = 64 << 10 // bytes of each stream that are always kept
	maxOutputInSum = 32 << 20 // bytes beyond these, for all calls together
)

// outputHeld ends the standard error of an Exec whose output may be incomplete:
// CRI has no other place to report that.
const outputHeld = "\n[crius: output incomplete: the command has ended, but a process that it started keeps the output open]\n"

// answerRoom is more than the rest of an answer takes.
const answerRoom = 1 << 10

func (t *cliTask) Exec(ctx context.Context, args []string, timeout time.Duration) (*ExecResult, error) {
	return execSync(ctx, t, t.runtime.output, args, timeout)
}

// execer starts commands in a container, and kills them.
type execer interface {
	exec(ctx context.Context, c Command) (*execution, error)
	// killExec kills every process that a command has started, and forgets the command. It may do so later.
	killExec(ctx context.Context, e *execution)
}

// execSync is Open plus reading the output and waiting for the end. The memory
// for output is taken from budget until ctx ends: an RPC's context ends when
// its answer has been sent. After the command's end execSync waits, within the
// timeout, for the output of its descendants, as Session.Output does.
func execSync(ctx context.Context, t execer, budget *capture.Budget, args []string, timeout time.Duration) (*ExecResult, error) {
	kept := budget.Part(MaxExecOutput - 2*freeOutput)
	rpc := ctx
	defer func() { context.AfterFunc(rpc, kept.Return) }()
	// The time counts from the request, not from the start of the process.
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
		return nil, notStarted(ctx, err)
	}
	trace.Leave(ctx) // the command may take as long as it needs
	stdout := capture.Head{Max: MaxExecOutput, Budget: kept, Free: freeOutput}
	stderr := capture.Head{Max: MaxExecOutput, Budget: kept, Free: freeOutput}
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_ = c.Output(ctx, c.Ended(), &stdout, &stderr) // neither returns an error
	}()
	defer func() {
		c.Close()
		<-copied
	}()
	select {
	case <-c.Ended():
		defer c.forget()
	case <-ctx.Done():
		_ = trace.Do(ctx, "kill exec process", func(ctx context.Context) error {
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
	r := &ExecResult{Stdout: stdout.Bytes(), Stderr: stderr.Bytes(), ExitCode: code}
	if c.Held() {
		r.tell(outputHeld)
	}
	return r, nil
}

// tell adds a notice to the standard error. It replaces other output if necessary:
// an answer is limited to 16 MiB in total.
func (r *ExecResult) tell(notice string) {
	longer := &r.Stderr
	if len(r.Stdout) > len(r.Stderr) {
		longer = &r.Stdout
	}
	if over := len(r.Stdout) + len(r.Stderr) + len(notice) - (MaxExecOutput - answerRoom); over > 0 {
		*longer = (*longer)[:len(*longer)-over]
	}
	r.Stderr = append(r.Stderr, notice...)
}

// notStarted returns the error for a command that was not started. fault.Timeout
// is for a command whose time is up: the kubelet counts that as a result of the
// probe, and in the end restarts the container, whereas it ignores any other
// error (kubernetes#106682). crius's own time limit for the runtime must not
// have that effect.
func notStarted(ctx context.Context, err error) error {
	if ctx.Err() != nil || !errors.Is(err, fault.Timeout) {
		return err
	}
	return fmt.Errorf("%s: %w", fault.Text(err), fault.Unavailable)
}

// Open has the runtime start the command detached, with pipes or a terminal of
// the server as its stdio. The runtime has exited before the process does
// anything; the process remains as a child of this server (Reaper makes it a
// subreaper), which sees its exit by itself: no second monitor, no mount, no
// dbus call.
func (t *cliTask) Open(ctx context.Context, c Command) (*stdio.Session, error) {
	child, err := t.exec(ctx, c)
	if err != nil {
		return nil, err
	}
	return child.Session, nil
}

// exec starts the command. A runtime sandbox's command has no process on the node that
// dies with the runtime, and no name until the runtime has reported its pid.
func (t *cliTask) exec(ctx context.Context, c Command) (*execution, error) {
	a, err := t.runtime.Probe(ctx)
	if err != nil {
		return nil, err
	}
	if a.quirks.innerPID == "" {
		leave, err := t.commands.enter(ctx)
		if err != nil {
			return nil, err
		}
		defer leave()
		e, err := t.begin(ctx, c)
		if err == nil {
			t.endWithMachine(e)
		}
		return e, err
	}
	return beginWhole(ctx, func(ctx context.Context) (*execution, error) { return t.begin(ctx, c) },
		func(e *execution) { t.killLate(ctx, e) })
}

// beginWhole lets begin finish although ctx ends, within verbTimeout: if begin
// were stopped half-way, it might leave a command that cannot be killed because
// its pid is unknown. A command that starts too late is killed and released.
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

// execution is a running command.
type execution struct {
	*stdio.Session
	proc.Command        // in a runtime sandbox a helper's
	innerPID     int    // its pid inside a runtime sandbox; 0: it is in none
	dir          string // see Command.noted
	kill         func() // used if no pid identifies the command
	left         bool   // by an earlier server
	hasten       bool   // the runtime must set the terminal's size before the command reads it
}

// forget removes the note for the next server.
func (e *execution) forget() {
	if e.dir != "" {
		_ = mount.RemoveAll(e.dir) // otherwise it goes with the container
	}
}

// killLate kills a command for which no caller waits any more. It may have
// ended already and left other processes.
func (t *cliTask) killLate(ctx context.Context, e *execution) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), verbTimeout)
	defer cancel()
	if e.Leader == 0 {
		e.NoteLeader()
	}
	t.kill(ctx, e)
	_ = e.Watch(e.PID) // otherwise the Reaper reaps it later
}

func (t *cliTask) killExec(ctx context.Context, e *execution) {
	t.commands.soon(ctx, func(ctx context.Context) {
		t.kill(ctx, e)
		e.forget()
	})
}

func (t *cliTask) kill(ctx context.Context, e *execution) {
	if e.innerPID != 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), verbTimeout)
		defer cancel()
		t.killSandboxed(ctx, e.innerPID)
		proc.KillTree(e.PID, proc.IsOwnChild)
		return
	}
	if t.ref.Holder != "" {
		// The command is out of reach. Its stand-in here passes signals on, except
		// SIGKILL.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), forwardTime)
		defer cancel()
		standsIn := func(pid int) bool { return e.left || proc.IsOwnChild(pid) }
		proc.Terminate(ending, e.PID, standsIn)
		proc.KillTree(e.PID, standsIn)
	}
	e.Kill(ctx, t.ref.ID, t.ref.Cgroup)
}

// forwardTime is how long a signal may take to end a command in a virtual
// machine.
const forwardTime = 2 * time.Second
