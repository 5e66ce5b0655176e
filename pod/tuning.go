package pod

import (
	"context"
	"log/slog"
	"slices"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/pod/records"
)

// This file deals with containers that have CPUs of their own.

func (e *Engine) newTuner() (*tuning.Tuner, error) {
	return tuning.New(tuning.Options{
		Config: e.cfg.Tuning, Node: e.cfg.CPUs, StateDir: e.cfg.StateDir, Boot: e.planner().Boot,
		Later: func(name string, work func(context.Context) error) { e.cleanups.AddNow(name, work) },
	})
}

// cpus are the CPUs of one container, if it has them to itself.
type cpus struct {
	tuner      *tuning.Tuner
	plan       *tuning.Plan
	id, cgroup string // of the container
	parent     string // cgroup_parent of its pod
}

// tune does what is planned for the CPUs that the container has with these limits, before it runs on
// them.
func (c *cpus) tune(ctx context.Context, limits *cri.LinuxContainerResources) error {
	plan, err := c.follow(limits)
	if plan == nil || err != nil {
		return err
	}
	tune := func(ctx context.Context) error { return c.tuner.Apply(ctx, c.id, c.cgroup, plan) }
	if err := trace.Do(ctx, "tune CPUs", tune); err != nil {
		return err
	}
	slog.InfoContext(ctx, "CPUs tuned for container", "container", c.id, "cpus", plan.CPUs.String())
	return nil
}

// follow returns the plan for the CPUs that the container has with these limits; nil: there is
// nothing to do for it.
func (c *cpus) follow(limits *cri.LinuxContainerResources) (*tuning.Plan, error) {
	if !c.plan.Changes() {
		return nil, nil
	}
	plan, err := c.tuner.Follow(*c.plan, tuning.Container{CgroupParent: c.parent, Limits: limits})
	return &plan, err
}

// share adds the node's shared CPUs, which the container has as well, to the CPUs of a request; asked
// is what it was created with. If that does not name its CPUs, its workload has set them for good.
func (c *cpus) share(r, asked *cri.LinuxContainerResources) string {
	own, err := tuning.ParseSet(r.GetCpusetCpus())
	first, _ := tuning.ParseSet(asked.GetCpusetCpus())
	if c.plan == nil || len(c.plan.Shared) == 0 || err != nil || len(own) == 0 || !slices.Equal(first, c.plan.CPUs) {
		return ""
	}
	return own.With(c.plan.Shared).String()
}

// move makes what is done for the CPUs follow an update, which has been carried out.
func (c *cpus) move(ctx context.Context, plan *tuning.Plan) {
	if plan == nil {
		return
	}
	move := func(ctx context.Context) error { return c.tuner.Move(ctx, c.id, plan) }
	if err := trace.Do(ctx, "move CPU settings", move); err != nil {
		slog.ErrorContext(ctx, "CPU settings do not follow the container to other CPUs", "container", c.id, "cpus", plan.CPUs.String(), "err", err)
	}
}

// followCPUs has the settings of CPUs follow updates of containers that an earlier server could not
// record.
func (e *Engine) followCPUs(ctx context.Context) {
	for _, c := range e.containers.All() {
		now := c.Now()
		if now.Phase != records.Started || now.exit != nil {
			continue
		}
		plan, err := c.cpus.follow(now.Resources.M)
		if err != nil {
			slog.ErrorContext(ctx, "CPU settings do not follow the container to other CPUs", "container", c.ID, "err", err)
			continue
		}
		c.cpus.move(ctx, plan)
	}
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
