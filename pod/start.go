package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
)

// StartContainer runs a created container.
func (e *Engine) StartContainer(ctx context.Context, id string) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return err
	}
	err = e.run(ctx, verb{"start", c.ID}, func(ctx context.Context) error {
		c.LockLife(ctx)
		defer c.Life.Unlock()
		if err := c.start(ctx); err != nil {
			return fmt.Errorf("start container %s: %w", c.ID, err)
		}
		return nil
	})
	if ctx.Err() != nil {
		c.abandonStart()
	}
	return err
}

// abandonStart shows a container as running while it is started for a caller that has stopped
// waiting. A kubelet that found it created would have the next attempt created and started, and
// then both would run.
func (c *Container) abandonStart() {
	c.Change(func(now *liveContainer) {
		if now.starting {
			now.abandoned = time.Now()
		}
	})
	c.Publish()
}

// endStart is called when a start has ended, in whatever way.
func (c *Container) endStart() {
	abandoned := false
	c.Change(func(now *liveContainer) {
		abandoned = !now.abandoned.IsZero()
		now.starting, now.abandoned = false, time.Time{}
	})
	if abandoned {
		c.Publish()
	}
}

func (c *Container) start(ctx context.Context) error {
	if v := c.View(); v.State != cri.ContainerState_CONTAINER_CREATED {
		why := ""
		if v.StartedAt.IsZero() && v.Message != "" {
			why = " (" + v.Message + ")"
		}
		return fmt.Errorf("container is in state %s%s, only a created container can be started: %w", v.State, why, fault.Precondition)
	}
	if err := c.mayStart(); err != nil {
		return err
	}
	c.Change(func(now *liveContainer) { now.starting = true })
	defer c.endStart()
	if c.sandbox.Now().Restoring {
		return fmt.Errorf("the other containers of its pod are still being restored, start it when RestorePod has returned: %w", fault.Unavailable)
	}
	now := c.Now()
	if refused := now.Refused(); refused != nil {
		return c.failStart(ctx, refused)
	}
	c.nri.Begin()
	if err := c.nri.Plugins.StartContainer(ctx, c.describe); err != nil {
		return c.failStart(ctx, err)
	}
	if err := c.cpus.tune(ctx, now.Resources.M); err != nil {
		return c.failStart(ctx, err)
	}
	// If the server is killed between here and the last Put, the next one cannot tell from the
	// record whether the program runs, and asks the runtime. The time of the start must be on
	// record, since the next server may come much later; and it is taken before the runtime
	// returns, since a short-lived program may have ended by then.
	started := time.Now()
	c.Change(func(now *liveContainer) { now.Phase, now.StartedAt = records.Starting, started })
	if err := c.Put(ctx); err != nil {
		c.Change(func(now *liveContainer) { now.Phase, now.StartedAt = records.Created, time.Time{} })
		c.nri.End(ctx, nil)
		return err
	}
	if err := trace.Do(ctx, "runtime start", c.Now().task.Start); err != nil {
		return c.failStart(ctx, c.plan.BlameProfile(err))
	}
	c.Change(func(now *liveContainer) { now.Phase = records.Started })
	c.Publish()
	c.Tell()
	if err := c.Put(ctx); err != nil { // it runs all the same, and recovery would find that out
		slog.WarnContext(ctx, "container start not recorded, retrying", "container", c.ID, "err", err)
		c.engine.cleanups.Add(c.ID, c.recordStart)
	}
	slog.InfoContext(ctx, "container started", "container", c.ID, "pod", c.sandbox.ID, "pid", c.Now().task.PID())
	c.nri.End(ctx, c.nri.Plugins.ContainerStarted)
	return nil
}

// mayStart refuses a start while the state of the container is unknown.
func (c *Container) mayStart() error {
	now := c.Now()
	if now.unreachable {
		return fmt.Errorf("its monitor has not answered since the server started; see crius check: %w", fault.Unavailable)
	}
	if now.Phase == records.Starting {
		return fmt.Errorf("a start requested by a previous server is still running: %w", fault.Unavailable)
	}
	return nil
}

// recordStart records a start that could not be recorded when it happened.
func (c *Container) recordStart(ctx context.Context) error { return c.Finish(ctx, c.Put) }

// failStart ends a container whose start failed. It can never be started.
func (c *Container) failStart(ctx context.Context, cause error) error {
	if c.stop.Asked() { // the step failed because the container was dead or gone
		cause = fmt.Errorf("stopped while starting: %s: %w", fault.Text(cause), fault.Precondition)
	}
	ctx, cancel := undoContext(ctx)
	defer cancel()
	c.Change(func(now *liveContainer) { now.StartError, now.StartedAt = fault.Text(cause), time.Time{} })
	err := errors.Join(cause, c.Put(ctx), c.stop.Kill(ctx))
	c.restoreCPUs() // if it was dead before
	c.nri.End(ctx, nil)
	c.Publish() // if it was dead before, another end has been published
	c.Tell()
	return err
}
