package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/limits"
	"github.com/crius-run/crius/oci/stdio"
)

// shimTask is a container of a shim whose processes are processes of this
// machine, as those of runc's shim are. Only some operations need the shim; the
// rest uses pids and the cgroup, as for a command-line runtime.
type shimTask struct {
	watched
	runtime *shimmed
	record  shim.Record
}

// ask has the shim do something, over a new connection: connecting is faster
// than any answer, and a fresh connection is never broken.
func (t *shimTask) ask(ctx context.Context, do func(context.Context, *shim.Client) error) error {
	ctx, cancel := t.withVerbTime(ctx)
	defer cancel()
	client, err := t.record.Reach(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", t.runtime.name, err)
	}
	defer client.Close()
	if err := do(ctx, client); err != nil {
		return fmt.Errorf("%s: %w", t.runtime.name, err)
	}
	return nil
}

func (t *shimTask) withVerbTime(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, verbTimeout,
		fmt.Errorf("the shim of %s did not answer within %s: %w", t.runtime.name, verbTimeout, fault.Timeout))
}

func (t *shimTask) process() shim.Process { return shim.Process{ID: t.ref.ID} }

// Start has another program ask the shim, which goes on if this server dies.
func (t *shimTask) Start(ctx context.Context) error {
	if err := t.start(ctx); err != nil {
		return startFailed(t.ref.Dir, fmt.Errorf("%s: %w", t.runtime.name, err)) // gVisor looks for the program only now
	}
	return nil
}

func (t *shimTask) start(ctx context.Context) error {
	program, err := t.runtime.client()
	if err != nil {
		return err
	}
	lock, err := lockStart(ctx, t.ref, verbTimeout)
	if err != nil {
		return err
	}
	defer lock.Close()
	ctx, cancel := t.withVerbTime(ctx)
	defer cancel()
	defer trace.For(ctx, "shim")()
	argv := []string{program, "start", "--dir=" + t.ref.Dir, t.ref.ID}
	said, err := command{argv: argv, files: []*os.File{lock}}.run(ctx)
	if err != nil {
		return fmt.Errorf("%s start: %w", program, err)
	}
	var outcome shim.StartOutcome
	if err := json.Unmarshal(said, &outcome); err != nil {
		return fmt.Errorf("%s start: %w", program, err)
	}
	return outcome.Err()
}

// Started waits for a start that an earlier server may have left running.
func (t *shimTask) Started(ctx context.Context) (bool, error) {
	lock, busy := lockStart(ctx, t.ref, leftStart)
	if busy == nil {
		defer lock.Close()
	} else if !errors.Is(busy, fault.Timeout) {
		return false, busy
	}
	if started, err := t.answersStarted(ctx); started || err != nil {
		return started, err
	}
	return false, busy
}

// answersStarted asks the shim whether the container has been started.
func (t *shimTask) answersStarted(ctx context.Context) (started bool, err error) {
	err = t.ask(ctx, func(ctx context.Context, c *shim.Client) error {
		started, err = c.Started(ctx, t.process())
		return err
	})
	return started, err
}

// hangTime is the time after which a shim that does not answer counts as
// hanging. A kill gets a little more.
const hangTime = 7 * time.Second

// Kill uses pids. A hanging shim would never report the exit, so Kill kills the
// shim as well, and with it all of its containers.
func (t *shimTask) Kill(ctx context.Context) error {
	if err := t.watched.Kill(ctx); err != nil || t.dead() {
		return err
	}
	soon, cancel := context.WithTimeoutCause(ctx, hangTime, fault.Timeout)
	defer cancel()
	if _, err := t.answersStarted(soon); errors.Is(err, fault.Timeout) {
		slog.WarnContext(ctx, "shim does not answer, killing it", "container", t.ref.ID, "pid", t.record.Process.PID)
		return conmon.Signal(t.record.Process, unix.SIGKILL)
	}
	return nil
}

func (t *shimTask) Update(ctx context.Context, u limits.Update) error {
	return t.ref.limits().Update(ctx, u, t.runtimeUpdate)
}

func (t *shimTask) runtimeUpdate(ctx context.Context, resources *specs.LinuxResources) error {
	text, err := json.Marshal(resources)
	if err != nil {
		return err
	}
	return t.ask(ctx, func(ctx context.Context, c *shim.Client) error { return c.Update(ctx, t.ref.ID, text) })
}

func (t *shimTask) Forward(context.Context, uint16) (Stream, error) {
	return nil, fmt.Errorf("runtime handler %s cannot forward ports into the sandbox; use the pod IP: %w", t.runtime.name, fault.Unimplemented)
}

// Attach joins the container's streams at its monitor, which has no terminal.
func (t *shimTask) Attach(ctx context.Context, wanted conmon.Streams) (*stdio.Session, error) {
	return t.attach(ctx, wanted, t.resize(t.process()))
}

// resize returns what sets the size of a terminal. gVisor's kernel does not tell
// the processes on it, so they get SIGWINCH: of the container's own terminal all,
// as by its command line; of a command's the command alone, because the others
// have no part in it, and some servers stop on that signal.
func (t *shimTask) resize(p shim.Process) func(context.Context, stdio.Size) error {
	return func(ctx context.Context, size stdio.Size) error {
		return t.ask(ctx, func(ctx context.Context, c *shim.Client) error {
			if err := c.ResizePty(ctx, p, size.Width, size.Height); err != nil || !shim.OfRunsc(t.record.Program) {
				return err
			}
			return c.Kill(ctx, p, unix.SIGWINCH, p.Exec == "")
		})
	}
}

// sandboxedShimTask is a container of a shim in a runtime sandbox with its own kernel,
// such as Kata's virtual machine. Its pid is a stand-in's, the same for all
// containers of a pod, so everything goes through the shim.
type sandboxedShimTask struct {
	*shimTask
	counted usageRate
	killed  atomic.Int64 // when a kill was first acknowledged, in Unix nanoseconds; 0: not yet
}

// Signal ignores a container that is already gone.
func (t *sandboxedShimTask) Signal(ctx context.Context, sig unix.Signal) error {
	err := t.ask(ctx, func(ctx context.Context, c *shim.Client) error { return c.Kill(ctx, t.process(), sig, false) })
	if t.dead() || errors.Is(err, fault.NotFound) || errors.Is(err, shim.ErrGone) {
		return nil
	}
	return err
}

// Kill: a shim reports no exit for a container that has never run. Such a
// container is deleted in the shim, and the monitor, which has nothing to wait
// for, is notified. The same goes for a container that lives on long after its
// shim has acknowledged the kill: the shim ends with it.
func (t *sandboxedShimTask) Kill(ctx context.Context) error {
	if t.dead() {
		return nil
	}
	soon, cancel := context.WithTimeoutCause(ctx, hangTime, fault.Timeout)
	defer cancel()
	started := false
	err := t.ask(soon, func(ctx context.Context, c *shim.Client) (err error) {
		if started, err = c.Started(ctx, t.process()); err == nil {
			err = c.Kill(ctx, t.process(), unix.SIGKILL, true)
		}
		return err
	})
	if t.dead() || err == nil && started && !t.ignoresKill() {
		return nil
	}
	slog.DebugContext(ctx, "container ignores SIGKILL, deleting it with the runtime", "container", t.ref.ID, "err", err)
	ctx, forgotten := context.WithTimeout(context.WithoutCancel(ctx), verbTimeout)
	defer forgotten()
	if err := t.runtime.forget(ctx, t.ref); err != nil {
		return err
	}
	return t.client.Release(ctx)
}

// ignoresKill records that a kill was acknowledged, and reports whether the first
// one was so long ago that the container should be dead.
func (t *sandboxedShimTask) ignoresKill() bool {
	now := time.Now()
	return !t.killed.CompareAndSwap(0, now.UnixNano()) && now.Sub(time.Unix(0, t.killed.Load())) > hangTime
}

// Usage asks the shim: nothing on this machine accounts for one container.
func (t *sandboxedShimTask) Usage(ctx context.Context) (u cgroup.Usage, err error) {
	err = t.ask(ctx, func(ctx context.Context, c *shim.Client) error {
		used, err := c.Usage(ctx, t.ref.ID)
		if err != nil {
			return err
		}
		u = t.counted.of(cgroup.Usage{
			Time:   time.Now(),
			CPU:    &cgroup.CPU{Total: used.CPU},
			Memory: &cgroup.Memory{Usage: used.Memory, WorkingSet: &used.WorkingSet},
			Tasks:  &used.Tasks,
		})
		return nil
	})
	return u, err
}

// Update: the shim applies the limits in the guest; those on this machine are
// the runtime sandbox's. A memory limit that is too low is left to the guest's kernel.
func (t *sandboxedShimTask) Update(ctx context.Context, u limits.Update) error {
	if m := u.Resources.Memory; shim.OfRunsc(t.record.Program) && m != nil && m.Swap != nil {
		_ = t.runtimeUpdate(ctx, &specs.LinuxResources{Memory: &specs.LinuxMemory{Swap: m.Swap}}) // as in cliTask.runtimeUpdate
	}
	err := t.runtimeUpdate(ctx, u.Resources)
	if err == nil || u.Old == nil || errors.Is(err, fault.Unimplemented) {
		return err
	}
	if back := t.runtimeUpdate(ctx, u.Old); back != nil {
		slog.WarnContext(ctx, "shim failed to restore the old limits", "container", t.ref.ID, "err", back)
	}
	return err
}

// Forward has a crius program in the runtime sandbox connect to the port: a guest's
// loopback can only be reached from inside. The pod's own container, on which
// this is called, contains that program. It is of no use to anybody after this server.
func (t *sandboxedShimTask) Forward(ctx context.Context, port uint16) (Stream, error) {
	spec, err := ReadSpec[specs.Spec](t.ref.Dir)
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	e, err := t.exec(ctx, Command{Args: []string{spec.Process.Args[0], "forward", fmt.Sprint(port)}, Stdin: true, noted: true})
	if err != nil {
		return nil, fmt.Errorf("start a forwarder in the sandbox: %w", err)
	}
	conn, err := stdio.Connect(ctx, e.Session, e.kill)
	if err != nil {
		return nil, fmt.Errorf("TCP port %d in the sandbox: %w: %w", port, err, fault.Unavailable)
	}
	return conn, nil
}
