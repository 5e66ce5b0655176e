package pod

import (
	"context"
	"fmt"
	"log/slog"
	"path"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/limits"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/records"
)

// UpdateContainerResources changes the limits in force. Fields that are zero keep their value
// (CRI: UpdateContainerResourcesRequest).
func (e *Engine) UpdateContainerResources(ctx context.Context, id string, r *cri.LinuxContainerResources) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx) // plugins that were asked rely on the update
	return c.changeResources(ctx, r, func(limits *nri.Resources) (*nri.Resources, error) {
		return e.deps.Plugins.UpdateContainer(ctx, c.describe, limits)
	})
}

// changeResources applies r to the limits in force, and change to the result.
func (c *Container) changeResources(ctx context.Context, r *cri.LinuxContainerResources, change nri.Change) error {
	c.sandbox.raiseRuntimeSandbox(ctx)
	c.LockLife(ctx)
	defer c.Life.Unlock()
	if c.View().State == cri.ContainerState_CONTAINER_EXITED {
		return fmt.Errorf("container %s has exited: %w", c.ID, fault.Precondition)
	}
	// Half an update is worse than a late one: a caller that leaves does not interrupt it.
	update := func(ctx context.Context) error { return c.update(ctx, r, change) }
	err := c.engine.deps.Trace.Do(context.WithoutCancel(ctx), "update container", c.ID, update)
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.ID, err)
	}
	return nil
}

func (c *Container) update(ctx context.Context, r *cri.LinuxContainerResources, change nri.Change) (err error) {
	yielded := annotation.Yield(r, c.plan.Workload.M)
	if cpus := c.cpus.share(r, c.plan.Config.M.GetLinux().GetResources()); cpus != "" {
		yielded.CpusetCpus = cpus // a copy: there is a limit to which it yields
	}
	merged := blueprint.MergeLimits(c.Now().Resources.M, yielded)
	var update limits.Update
	if update.Resources, err = spec.Resources(merged, c.engine.planner().Host); err != nil {
		return err
	}
	if old := c.View().Resources.GetLinux(); old != nil {
		if update.Old, err = spec.Resources(old, c.engine.planner().Host); err != nil {
			return err
		}
	}
	c.nri.Begin()
	var updated func(context.Context, func() *nri.Container) // nil: not yet
	defer func() { c.nri.End(ctx, updated) }()
	set, err := change(update.Resources)
	if err != nil {
		return err
	}
	merged = spec.Report(merged, set)
	if err := blueprint.EnoughMemory(c.runtime.Handler(), c.plan.Handler, merged); err != nil {
		return err
	}
	if score := r.GetOomScoreAdj(); score != 0 {
		update.OOMScoreAdj = new(spec.OOMScoreAdj(score, c.engine.planner().Host))
	}
	plan, err := c.cpus.follow(merged)
	if err == nil && plan != nil {
		err = c.cpus.tuner.MayMove(c.ID, plan)
	}
	if err != nil {
		return err
	}
	task := c.Now().task
	if err := task.Update(ctx, update); err != nil {
		return overtaken(ctx, task, err)
	}
	c.cpus.move(ctx, plan)
	c.Change(func(now *liveContainer) { now.Resources.M = merged })
	c.Publish()
	updated = c.nri.Plugins.ContainerUpdated
	return c.Put(ctx)
}

// UpdateSandboxResources records the resources that the kubelet has given to the pod since its
// creation; nil keeps the former ones. The pod's cgroup belongs to the kubelet, which changes
// it afterwards and takes an error for a refusal (since 1.36; CRI: UpdatePodSandboxResources).
// The cgroup of a runtime sandbox with its own kernel belongs to crius.
func (e *Engine) UpdateSandboxResources(ctx context.Context, id string, overhead, resources *cri.LinuxContainerResources) error {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return err
	}
	s.LockLife(ctx)
	defer s.Life.Unlock()
	if s.View().State != cri.PodSandboxState_SANDBOX_READY {
		return fmt.Errorf("pod %s is not ready: %w", s.ID, fault.Precondition)
	}
	ctx = context.WithoutCancel(ctx) // as for a container
	if err := s.askPluginsForUpdate(ctx, overhead, resources); err != nil {
		return fmt.Errorf("update pod %s: %w", s.ID, err)
	}
	before := s.View().Config
	s.Change(func(now *livePod) { now.Give(overhead, resources) })
	if err := s.limitRuntimeSandbox(ctx, before); err != nil {
		s.Change(func(now *livePod) { now.Give(before.GetLinux().GetOverhead(), before.GetLinux().GetResources()) })
		return fmt.Errorf("update pod %s: %w", s.ID, err)
	}
	if err := e.deps.Trace.Do(ctx, "update pod", s.ID, s.Put); err != nil {
		return fmt.Errorf("update pod %s: %w", s.ID, err)
	}
	s.Publish()
	e.deps.Plugins.PodUpdated(ctx, s.describe)
	return nil
}

// limitRuntimeSandbox gives the runtime sandbox in which all containers run the limits of the pod,
// as far as the pod's cgroup allows them; raiseRuntimeSandbox does the rest. It wants Life held.
func (s *Sandbox) limitRuntimeSandbox(ctx context.Context, before *cri.PodSandboxConfig) error {
	infra := s.Now().infra
	if !s.plan.Sandboxed || infra == nil {
		return nil
	}
	ctx, cancel := undoContext(ctx)
	defer cancel()
	abilities, err := s.runtime.Probe(ctx)
	if err != nil {
		return err
	}
	old, _, err := s.engine.planner().RuntimeSandboxLimits(before, abilities.VirtualMachine, s.parentQuota)
	if err != nil {
		return err
	}
	now, clamped, err := s.engine.planner().RuntimeSandboxLimits(s.record().Current(), abilities.VirtualMachine, s.parentQuota)
	if err != nil {
		return err
	}
	now.Old = old.Resources
	if err := infra.Update(ctx, now); err != nil {
		return err
	}
	s.clamped.Store(clamped)
	return nil
}

// parentQuota reads the CPU quota of the cgroup above the runtime sandbox's.
func (s *Sandbox) parentQuota() (quota, period int64, err error) {
	return cgroup.Quota(path.Dir(s.infraRef().Cgroup))
}

// raiseRuntimeSandbox gives the runtime sandbox the limits that the pod's cgroup did not allow when
// they were requested. A kubelet that raises the limits of a pod updates the containers last. What
// is not allowed even then is retried at the next update.
func (s *Sandbox) raiseRuntimeSandbox(ctx context.Context) {
	if !s.clamped.Load() {
		return
	}
	s.LockLife(ctx)
	defer s.Life.Unlock()
	if s.Now().Phase != records.Ready {
		return
	}
	if err := s.limitRuntimeSandbox(ctx, s.record().Current()); err != nil {
		slog.WarnContext(ctx, "sandbox limits not raised, retrying at the next container update", "pod", s.ID, "err", err)
	}
}
