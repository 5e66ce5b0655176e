package pod

import (
	"context"
	"log/slog"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/tuning"
)

// This file deals with containers that have CPUs of their own.

func (e *Engine) newTuner() (*tuning.Tuner, error) {
	return tuning.New(tuning.Options{
		Config: e.cfg.Tuning, Node: e.cfg.CPUs, StateDir: e.cfg.StateDir, Boot: e.planner.Boot,
		Later: func(name string, work func(context.Context) error) { e.cleanups.AddNow(name, work) },
	})
}

// cpus are the CPUs of one container, if it has them to itself.
type cpus struct {
	tuner      *tuning.Tuner
	plan       *tuning.Plan
	id, cgroup string // of the container
}

// tune carries out the plan for the CPUs, before the container runs on them.
func (c *cpus) tune(ctx context.Context) error {
	if !c.plan.Changes() {
		return nil
	}
	tune := func(ctx context.Context) error { return c.tuner.Apply(ctx, c.id, c.cgroup, c.plan) }
	if err := trace.Do(ctx, "tune CPUs", tune); err != nil {
		return err
	}
	slog.InfoContext(ctx, "CPUs tuned for container", "container", c.id, "cpus", c.plan.CPUs.String())
	return nil
}

// restore undoes tune. It is idempotent.
func (c *cpus) restore(ctx context.Context) error {
	if !c.plan.Changes() {
		return nil
	}
	return trace.Do(ctx, "restore CPUs", func(ctx context.Context) error { return c.tuner.Release(ctx, c.id) })
}

// restoreCPUs restores the CPUs of a dead container. Failures are retried, and do not delay the
// report of the exit.
func (c *Container) restoreCPUs() {
	if !c.plan.Tuning.Changes() {
		return
	}
	ctx, cancel := undoContext(c.engine.background.Closing())
	defer cancel()
	if err := c.engine.deps.Trace.Do(ctx, "restore CPUs", c.ID, c.cpus.restore); err != nil {
		c.cpus.restoreLater(ctx, c.engine, err)
	}
}

// restoreLater retries restore in the background. It needs nothing of the container, which may
// be removed meanwhile.
func (c *cpus) restoreLater(ctx context.Context, e *Engine, failed error) {
	slog.WarnContext(ctx, "CPUs of a dead container not restored, retrying", "container", c.id, "err", failed)
	e.cleanups.Add("CPUs of "+c.id, c.restore)
}
