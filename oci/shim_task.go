package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/limits"
	"github.com/crius-run/crius/oci/stdio"
)

// shimTask is a container of a shim whose processes are processes of this machine,
// as those of runc's are. The shim is asked where something is its own: the rest
// goes by pids and the cgroup, as with a runtime of the command line.
type shimTask struct {
	watched
	runtime *shimmed
	record  shim.Record
}

// ask has the shim do something, over a connection for that alone: to make one
// takes less than any answer, and none has to be mended.
func (t *shimTask) ask(ctx context.Context, do func(context.Context, *shim.Client) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, verbTimeout,
		fmt.Errorf("the shim of %s did not answer within %s: %w", t.runtime.name, verbTimeout, fault.Timeout))
	defer cancel()
	client, err := t.dial(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", t.runtime.name, err)
	}
	defer client.Close()
	if err := do(ctx, client); err != nil {
		return fmt.Errorf("%s: %w", t.runtime.name, err)
	}
	return nil
}

// dial connects to the shim. The error is shim.ErrGone if that is dead: the container that it
// had is still there for whoever asks, so it is not fault.NotFound.
func (t *shimTask) dial(ctx context.Context) (*shim.Client, error) {
	client, err := t.record.Dial(ctx)
	switch {
	case errors.Is(err, fault.NotFound):
		return nil, fmt.Errorf("reach shim at %s: %w", t.record.Address, shim.ErrGone)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", err, fault.Unavailable)
	}
	return client, nil
}

func (t *shimTask) process() shim.Process { return shim.Process{ID: t.ref.ID} }

func (t *shimTask) Start(ctx context.Context) error {
	return t.ask(ctx, func(ctx context.Context, c *shim.Client) error {
		_, err := c.Start(ctx, t.process())
		return err
	})
}

// Started: the shim answers when a start that an earlier server has asked for is
// over.
func (t *shimTask) Started(ctx context.Context) (started bool, err error) {
	err = t.ask(ctx, func(ctx context.Context, c *shim.Client) error {
		started, err = c.Started(ctx, t.process())
		return err
	})
	return started, err
}

// hangTime is after which a shim hangs that does not answer. A kill is given a
// little more.
const hangTime = 7 * time.Second

// Kill goes by pids. A shim that hangs would tell of no end, so it is killed as
// well, and with it all that it has.
func (t *shimTask) Kill(ctx context.Context) error {
	if err := t.watched.Kill(ctx); err != nil || t.dead() {
		return err
	}
	soon, cancel := context.WithTimeoutCause(ctx, hangTime, fault.Timeout)
	defer cancel()
	if _, err := t.Started(soon); errors.Is(err, fault.Timeout) {
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

// Attach joins the container's streams at its monitor, which knows of no terminal.
func (t *shimTask) Attach(ctx context.Context, wanted conmon.Streams) (*stdio.Session, error) {
	return t.attach(ctx, wanted, t.resize(t.process()))
}

func (t *shimTask) resize(p shim.Process) func(context.Context, stdio.Size) error {
	return func(ctx context.Context, size stdio.Size) error {
		return t.ask(ctx, func(ctx context.Context, c *shim.Client) error { return c.ResizePty(ctx, p, size.Width, size.Height) })
	}
}

// sandboxedShimTask is a container of a shim that lives in a sandbox with a kernel of its own,
// Kata's virtual machine for one. Its pid is a stand-in's, for all of a pod the
// same, so everything goes through the shim.
type sandboxedShimTask struct {
	*shimTask
	counted usageRate
	killed  atomic.Int64 // when a kill was first acknowledged, in Unix nanoseconds; 0: not yet
}

// Signal: a container that is gone meanwhile has no use for it.
func (t *sandboxedShimTask) Signal(ctx context.Context, sig unix.Signal) error {
	err := t.ask(ctx, func(ctx context.Context, c *shim.Client) error { return c.Kill(ctx, t.process(), sig, false) })
	if t.dead() || errors.Is(err, fault.NotFound) || errors.Is(err, shim.ErrGone) {
		return nil
	}
	return err
}

// Kill: of a container that has never run no end is told. It is forgotten, and the
// monitor, which has nothing to wait for, is told. So is one that lives on long
// after its shim has said that it is killed: the shim ends with it.
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
	if t.dead() || err == nil && started && !t.deathless() {
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

// deathless notes that a kill was acknowledged, and reports whether one was so long
// ago that the container should be dead.
func (t *sandboxedShimTask) deathless() bool {
	now := time.Now()
	return !t.killed.CompareAndSwap(0, now.UnixNano()) && now.Sub(time.Unix(0, t.killed.Load())) > hangTime
}

// Usage asks the shim: nothing on this machine counts for one container.
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

// Update: the limits in the guest are the shim's business, those on this machine
// are the sandbox's. Of a memory limit that is too low the guest's kernel has to
// tell.
func (t *sandboxedShimTask) Update(ctx context.Context, u limits.Update) error {
	err := t.runtimeUpdate(ctx, u.Resources)
	if err == nil || u.Old == nil {
		return err
	}
	if back := t.runtimeUpdate(ctx, u.Old); back != nil {
		slog.WarnContext(ctx, "shim failed to restore the old limits", "container", t.ref.ID, "err", back)
	}
	return err
}

// Forward has a program of ours in the sandbox connect the port: the loopback of
// a guest can be reached from inside alone. The pod's own container, of which this
// is asked, has that program.
func (t *sandboxedShimTask) Forward(ctx context.Context, port uint16) (Stream, error) {
	spec, err := ReadSpec[specs.Spec](t.ref.Dir)
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	e, err := t.exec(ctx, Command{Args: []string{spec.Process.Args[0], "forward", fmt.Sprint(port)}, Stdin: true})
	if err != nil {
		return nil, fmt.Errorf("start a forwarder in the sandbox: %w", err)
	}
	conn, err := stdio.Connect(ctx, e.Session, e.kill)
	if err != nil {
		return nil, fmt.Errorf("TCP port %d in the sandbox: %w: %w", port, err, fault.Unavailable)
	}
	return conn, nil
}
