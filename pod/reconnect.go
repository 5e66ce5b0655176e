package pod

import (
	"context"
	"log/slog"
	"time"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/retry"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/records"
)

// reconnect asks the monitor, which alone knows, for the state of the container. If the monitor
// hangs, reconnect waits for as long as the server lives: the container may be well, can be
// stopped, and is neither dead nor lost until that is known.
func (c *Container) reconnect(known chan<- struct{}) {
	ctx, cancel := context.WithCancel(c.engine.background.Closing())
	defer cancel()
	task, err := load(ctx, c.runtime, c.ref)
	if err != nil {
		return // the server ends
	}
	if begun := c.Now().Checkpoint; begun != nil {
		_ = c.endDump(ctx, begun) // criu does not bear that commands are killed; finishCheckpoint reports errors
	}
	again := task.EndAbandoned(ctx)
	if !c.setTask(task, false) || ctx.Err() != nil {
		task.Close()
		return
	}
	if again != nil {
		c.engine.cleanups.Add("exec processes of "+c.ID, unless(c.exited, again))
	}
	c.settleStart(ctx)
	cancel() // before watch, which takes as long as the container lives
	c.Publish()
	if oci.Exited(task) {
		// Readers must not see it alive even for a moment: the kubelet may have seen the
		// exit already.
		c.watch()
		close(known)
		return
	}
	close(known)
	c.Tell()
	c.watch()
}

// loadInfra is reconnect for the infra container of a pod that may still run.
func (r *recovery) loadInfra(s *Sandbox) {
	if s.Now().Phase != records.Ready || !s.plan.Infra || s.plan.BootID != s.engine.planner().Boot {
		return
	}
	infra := s.runtime.Unreachable(s.infraRef())
	s.Change(func(now *livePod) { now.infra, now.unreachable = infra, true })
	known := make(chan struct{})
	r.answers.add(known)
	s.engine.background.Go("reconnect infra container of pod "+s.ID, func() {
		ctx, cancel := context.WithCancel(s.engine.background.Closing())
		defer cancel()
		task, err := load(ctx, s.runtime, s.infraRef())
		if err != nil {
			return
		}
		again := task.EndAbandoned(ctx)
		if !s.takeInfra(task) || ctx.Err() != nil {
			task.Close()
			close(known)
			return
		}
		if again != nil {
			s.engine.cleanups.Add("port forwarders of pod "+s.ID, unless(task.Exited(), again))
		}
		close(known)
		cancel()
		s.watchInfra(task)
	})
}

// load asks a monitor until it answers or ctx ends.
func load(ctx context.Context, runtime oci.Runtime, ref oci.Ref) (oci.Task, error) {
	for pauses := backoff.New(retryMin, retryMax); ; {
		task, err := runtime.Load(ctx, ref)
		if err == nil || ctx.Err() != nil {
			return task, err
		}
		slog.WarnContext(ctx, "cannot reach monitor, retrying", "id", ref.ID, "err", err)
		if !pauses.Pause(ctx) {
			return nil, context.Cause(ctx)
		}
	}
}

// unless wraps work so that it is skipped once ended is closed.
func unless(ended <-chan struct{}, work retry.Work) retry.Work {
	return func(ctx context.Context) error {
		select {
		case <-ended:
			return nil
		default:
			return work(ctx)
		}
	}
}

// settleStart finds out whether a start that an earlier server began has happened. While the
// runtime still works on it, that is unknown: the container counts as running, as if its caller had
// stopped waiting (abandonStart), and can be stopped.
func (c *Container) settleStart(ctx context.Context) {
	if c.Now().Phase != records.Starting {
		return
	}
	task := c.Now().task
	for pauses := backoff.New(retryMin, retryMax); ; {
		started, err := task.Started(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil && !started {
			c.settleAs(records.Created)
			break
		}
		if err == nil || oci.Exited(task) {
			// The runtime knows nothing about a dead container. If it never started, its exit
			// by SIGKILL says so well enough.
			c.settleAs(records.Started)
			break
		}
		slog.WarnContext(ctx, "container start state not known yet, retrying", "container", c.ID, "err", err)
		select {
		case <-task.Exited():
		case <-ctx.Done():
			return
		case <-time.After(pauses.Next()):
		}
	}
	c.engine.cleanups.AddNow(c.ID, c.recordStart)
}

// settleAs replaces the phase, unless it has changed from Starting meanwhile.
func (c *Container) settleAs(p records.Phase) {
	c.Change(func(now *liveContainer) {
		if now.Phase != records.Starting {
			return
		}
		now.Phase = p
		if p == records.Created { // also if the server died while it undid a failed start
			now.StartedAt, now.StartError = time.Time{}, ""
		}
	})
}
