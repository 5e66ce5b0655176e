package pod

import (
	"context"
	"path/filepath"

	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/blueprint"
)

// Audit compares the node with its records.
func (e *Engine) Audit() *audit.Auditor { return e.audit }

func (e *Engine) newAuditor() *audit.Auditor {
	return audit.New(audit.Sources{
		StateDir: e.cfg.StateDir, RunDir: e.cfg.RunDir,
		NamespacesDir: e.cfg.NamespacesDir, PinPrefix: blueprint.PinPrefix, CgroupPrefix: e.cfg.CgroupPrefix, Mark: e.mark,
		Boot: e.planner().Boot, Node: known{e}, Records: e.records, Cleanups: e.cleanups, Checks: e.background,
		Images: e.deps.Images, Network: e.deps.Network, Runtimes: e.deps.Runtimes,
	})
}

// known implements audit.Node.
type known struct{ engine *Engine }

func (k known) Pods() []*audit.Pod {
	return mapped(k.engine.sandboxes.All(), func(s *Sandbox) *audit.Pod {
		return &audit.Pod{
			LivePod: auditedPod{s},
			ID:      s.ID, Plan: &s.plan, Files: s.files, Runtime: s.runtime, Infra: s.infraRef(), Network: s.networkPod(),
		}
	})
}

func (k known) Containers() []*audit.Container {
	return mapped(k.engine.containers.All(), func(c *Container) *audit.Container {
		return &audit.Container{
			LiveContainer: auditedContainer{c},
			ID:            c.ID, Plan: &c.plan, Sandboxed: c.sandbox.plan.Sandboxed, Runtime: c.runtime, Ref: c.ref, Roots: c.roots.all(), Exited: c.exited,
		}
	})
}

// auditedPod implements audit.LivePod.
type auditedPod struct{ *Sandbox }

func (p auditedPod) Now() audit.PodNow {
	now := p.Sandbox.Now()
	return audit.PodNow{PodState: now.PodState, Infra: now.infra, Ended: p.ending.Err() != nil, Gone: now.gone}
}

func (p auditedPod) Stop(ctx context.Context) error       { return p.stop(ctx) }
func (p auditedPod) SettleStop(ctx context.Context) error { return p.settleStop(ctx) }
func (p auditedPod) Release(ctx context.Context) error    { return p.release(ctx) }

// auditedContainer implements audit.LiveContainer.
type auditedContainer struct{ *Container }

func (c auditedContainer) Now() audit.ContainerNow {
	now := c.Container.Now()
	return audit.ContainerNow{ContainerState: now.ContainerState, Task: now.task, Unreachable: now.unreachable, Exit: now.exit, Gone: now.gone}
}

func (k known) Knows(id string) bool {
	return k.engine.sandboxes.Knows(id) || k.engine.containers.Knows(id)
}

func (k known) NameOf(text string) string { return k.engine.names.of(text) }

func (k known) CgroupParents() []string { return k.engine.CgroupParents() }

// CgroupParents returns the cgroups below which those of pods and containers are, including
// that of pods whose request names none. A cgroup may be listed more than once.
func (e *Engine) CgroupParents() []string {
	var parents []string
	note := func(_, name string, err error) {
		if err == nil && name != "" && filepath.Dir(name) != "/" {
			parents = append(parents, filepath.Dir(name))
		}
	}
	note(e.planner().Cgroup(nil, "", "0"))
	for _, pod := range e.sandboxes.All() {
		note(e.planner().Cgroup(pod.plan.Config.M, "", "0"))
	}
	return parents
}

func (k known) Sweep(ctx context.Context, id string, reclaim func(context.Context) error) error {
	return k.engine.sweep(ctx, id, reclaim)
}

func (k known) Repair(ctx context.Context, object string, do func(context.Context) error) error {
	ctx, cancel := undoContext(ctx)
	defer cancel()
	return k.engine.deps.Trace.Do(ctx, "repair", object, do)
}
