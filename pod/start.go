package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
)

// StartContainer runs a created container. If the caller stops waiting, the start goes on, and the
// container counts as running: a kubelet that found it created would have the next attempt created
// and started, and then both would run.
func (e *Engine) StartContainer(ctx context.Context, id string) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return err
	}
	start := verb{"start", c.ID}
	err = e.run(ctx, start, func(ctx context.Context) error {
		c.LockLife(ctx)
		defer c.Life.Unlock()
		if err := c.start(ctx); err != nil {
			return fmt.Errorf("start container %s: %w", c.ID, err)
		}
		return nil
	})
	if ctx.Err() == nil {
		return err
	}
	if ended := e.verbs.Running(start); ended != nil { // perhaps it waits for another verb
		c.abandonStart(ended)
	}
	return err
}

// abandonedStart is a start whose caller has stopped waiting.
type abandonedStart struct {
	at    time.Time
	ended <-chan struct{} // closed when the start has ended
}

// abandonStart shows the container as running until the start ends, and then as what it is.
func (c *Container) abandonStart(ended <-chan struct{}) {
	first := false
	c.Change(func(now *liveContainer) {
		if first = now.abandoned == nil || now.abandoned.ended != ended; first {
			now.abandoned = &abandonedStart{time.Now(), ended}
		}
	})
	if !first {
		return
	}
	c.Publish()
	c.Tell()
	c.engine.background.Go("await abandoned start of "+c.ID, func() {
		select {
		case <-ended:
		case <-c.engine.background.Closing().Done():
			return
		}
		c.Change(func(now *liveContainer) {
			if now.abandoned != nil && now.abandoned.ended == ended {
				now.abandoned = nil
			}
		})
		c.Publish()
	})
}

// mayRun reports whether the program may run by now although that is not known: the caller of the
// start has stopped waiting, an earlier server has begun the start, or the start has failed and the
// container is being killed.
func (now *liveContainer) mayRun() bool {
	return now.abandoned != nil || now.Phase == records.Starting && !now.starting
}

// beingStarted is the error of what needs a program that is known to run: runtimes run commands in
// a container whose program has not begun, and a probe by one would succeed.
func (c *Container) beingStarted() error {
	if now := c.Now(); now.exit != nil || !now.mayRun() {
		return nil
	}
	return fmt.Errorf("container %s is still being started, try again later: %w", c.ID, fault.Unavailable)
}

func (c *Container) start(ctx context.Context) error {
	if err := c.mayStart(); err != nil {
		return err
	}
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
	c.Change(func(now *liveContainer) { now.Phase, now.StartedAt, now.starting = records.Starting, started, true })
	if err := c.Put(ctx); err != nil {
		c.Change(func(now *liveContainer) {
			now.Phase, now.StartedAt, now.starting = records.Created, time.Time{}, false
		})
		c.nri.End(ctx, nil)
		return err
	}
	if err := trace.Do(ctx, "runtime start", c.Now().task.Start); err != nil {
		return c.failStart(ctx, c.plan.BlameProfile(err))
	}
	c.Change(func(now *liveContainer) { now.Phase, now.starting = records.Started, false })
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

// mayStart refuses a start of a container that is not created, or whose state is unknown.
func (c *Container) mayStart() error {
	now := c.Now()
	switch {
	case now.exit == nil && now.unreachable:
		return fmt.Errorf("its monitor has not answered since the server started; see crius check: %w", fault.Unavailable)
	case now.exit == nil && now.Phase == records.Starting && now.StartError == "":
		return fmt.Errorf("a start requested by a previous server is still running: %w", fault.Unavailable)
	case now.exit != nil || now.Phase != records.Created:
		v, why := c.show(&now), ""
		if v.StartedAt.IsZero() && v.Message != "" {
			why = " (" + v.Message + ")"
		}
		return fmt.Errorf("container is in state %s%s, only a created container can be started: %w", v.State, why, fault.Precondition)
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
	c.Change(func(now *liveContainer) {
		now.StartError, now.StartedAt, now.starting = fault.Text(cause), time.Time{}, false
	})
	err := errors.Join(cause, c.Put(ctx), c.stop.Kill(ctx))
	c.restoreCPUs() // if it was dead before
	c.nri.End(ctx, nil)
	c.Publish() // if it was dead before, another end has been published
	c.Tell()
	return err
}
