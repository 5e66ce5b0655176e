package pod

import (
	"context"
	"log/slog"
	"path/filepath"

	"github.com/crius-run/crius/pod/audit"
)

// pinPrefix is what the names of pinned namespaces begin with.
const pinPrefix = "crius-"

// Audit compares the node with its records.
func (e *Engine) Audit() *audit.Auditor { return e.audit }

func newAuditor(e *Engine) *audit.Auditor {
	return audit.New(audit.Sources{
		Layout: audit.Layout{
			StateDir: e.cfg.StateDir, RunDir: e.cfg.RunDir,
			NamespacesDir: e.cfg.NamespacesDir, PinPrefix: pinPrefix, CgroupPrefix: e.cfg.CgroupPrefix, Mark: e.mark,
		},
		Boot: e.boot, Node: known{e}, Records: e.records, Cleanups: e.cleanups, Checks: e.background,
		Images: e.deps.Images, Network: e.deps.Network, Runtimes: e.deps.Runtimes,
		Repair: func(ctx context.Context, object string, do func(context.Context) error) error {
			ctx, cancel := undoContext(ctx)
			defer cancel()
			return e.deps.Trace.Do(ctx, "repair", object, do)
		},
	})
}

// known implements audit.Node.
type known struct{ engine *Engine }

func (k known) Pods() []*audit.Pod {
	all := k.engine.sandboxes.All()
	pods := make([]*audit.Pod, len(all))
	for i, s := range all {
		pods[i] = &audit.Pod{
			ID: s.id, Plan: &s.plan, Files: s.files, Runtime: s.runtime, Infra: s.infraRef(), Network: s.networkPod(), Life: &s.life,
			Now: func() audit.PodNow {
				now := s.now()
				return audit.PodNow{PodState: now.PodState, Infra: now.infra, Ended: s.ending.Err() != nil, Gone: now.gone}
			},
			Put: s.put, Stop: s.stop, SettleStop: s.settleStop, Release: s.release,
		}
	}
	return pods
}

func (k known) Containers() []*audit.Container {
	all := k.engine.containers.All()
	containers := make([]*audit.Container, len(all))
	for i, c := range all {
		containers[i] = &audit.Container{
			ID: c.id, Plan: &c.plan, Sandboxed: c.sandbox.plan.Sandboxed, Runtime: c.runtime, Ref: c.ref, Roots: c.roots(), Life: &c.life, Exited: c.exited,
			Now: func() audit.ContainerNow {
				now := c.now()
				return audit.ContainerNow{ContainerState: now.ContainerState, Task: now.task, Unreachable: now.unreachable, Exit: now.exit, Gone: now.gone}
			},
			Put: c.put,
		}
	}
	return containers
}

func (k known) Knows(id string) bool {
	return k.engine.sandboxes.Knows(id) || k.engine.containers.Knows(id)
}

// CgroupParents has also the one that a pod without one in its request would have.
func (k known) CgroupParents() []string {
	var parents []string
	note := func(_, name string, err error) {
		if err == nil && name != "" && filepath.Dir(name) != "/" {
			parents = append(parents, filepath.Dir(name))
		}
	}
	note(k.engine.cfg.cgroupOf(nil, "", "0"))
	for _, pod := range k.engine.sandboxes.All() {
		note(k.engine.cfg.cgroupOf(pod.plan.Config.M, "", "0"))
	}
	return parents
}

func (k known) Sweep(ctx context.Context, id string) error { return k.engine.sweep(ctx, id) }

// CollectNetwork has the network plugins remove, in the background, what they hold
// for pods of ours that are gone. It is for the start of a server, after Recover.
func (e *Engine) CollectNetwork() {
	e.background.Go("collect garbage of networks", func() {
		ctx := e.background.Closing()
		if err := e.deps.Trace.Do(ctx, "collect", "networks", e.audit.CollectNetwork); err != nil {
			slog.WarnContext(ctx, "CNI plugins did not release everything they hold for removed pods, the next server start retries", "err", err)
		}
	})
}
