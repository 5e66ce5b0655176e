package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/records"
)

// Audit compares the node with its records.
func (e *Engine) Audit() *audit.Auditor { return e.audit }

func newAuditor(e *Engine) *audit.Auditor {
	return audit.New(audit.Sources{
		StateDir: e.cfg.StateDir, RunDir: e.cfg.RunDir,
		NamespacesDir: e.cfg.NamespacesDir, PinPrefix: blueprint.PinPrefix, CgroupPrefix: e.cfg.CgroupPrefix, Mark: e.mark,
		Boot: e.planner.Boot, Node: known{e}, Records: e.records, Cleanups: e.cleanups, Checks: e.background,
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

func (k known) CgroupParents() []string { return k.engine.CgroupParents() }

// CgroupParents are the cgroups below which those of pods and containers are, which includes
// that of pods whose request names none. Some may be in it more than once.
func (e *Engine) CgroupParents() []string {
	var parents []string
	note := func(_, name string, err error) {
		if err == nil && name != "" && filepath.Dir(name) != "/" {
			parents = append(parents, filepath.Dir(name))
		}
	}
	note(e.planner.Cgroup(nil, "", "0"))
	for _, pod := range e.sandboxes.All() {
		note(e.planner.Cgroup(pod.plan.Config.M, "", "0"))
	}
	return parents
}

func (k known) Sweep(ctx context.Context, id string) error { return sweep(ctx, k.engine, id) }

func (k known) Repair(ctx context.Context, object string, do func(context.Context) error) error {
	ctx, cancel := undoContext(ctx)
	defer cancel()
	return k.engine.deps.Trace.Do(ctx, "repair", object, do)
}

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

// Inspect is Audit().Verify for a node without a server: it reads the records, as
// Recover does, and changes nothing at all. The engine is good for nothing else
// afterwards. The caller holds the Lock.
func (e *Engine) Inspect(ctx context.Context) ([]audit.Finding, error) {
	pods, _, damagedPods, err := e.records.Pods.Read()
	if err != nil {
		return nil, fmt.Errorf("read pod records: %w", err)
	}
	ctrs, _, damagedCtrs, err := e.records.Containers.Read()
	if err != nil {
		return nil, fmt.Errorf("read container records: %w", err)
	}
	findings := append(damagedFindings("pod", damagedPods), damagedFindings("container", damagedCtrs)...)
	for id, rec := range pods {
		s, err := e.newSandbox(id, *rec)
		if err != nil {
			findings = append(findings, audit.Finding{Object: "pod " + id, Wrong: err.Error(), Advice: "add the handler to runtime.handlers again; until then the pod is not touched"})
			continue
		}
		e.sandboxes.Publish(id, s)
	}
	for id, rec := range ctrs {
		s, err := e.sandboxes.Find(rec.SandboxID)
		switch {
		case err == nil:
			c := e.newContainer(id, s, *rec)
			s.Change(func(now *livePod) { now.add(c) })
			e.containers.Publish(id, c)
		case pods[rec.SandboxID] == nil:
			findings = append(findings, audit.Finding{Object: "container " + id, Wrong: "its pod " + rec.SandboxID + " has no record", Remedy: "remove it"})
		}
	}
	e.deps.Network.Load(records.Attached(pods, e.planner.Boot))
	found, err := e.audit.Verify(ctx, false)
	return append(findings, found...), err
}

func damagedFindings(noun string, damaged []record.Damaged) []audit.Finding {
	var findings []audit.Finding
	for _, d := range damaged {
		findings = append(findings, audit.Finding{
			Object: noun + " " + d.ID, Wrong: fmt.Sprintf("its record %s cannot be read: %v", d.File, d.Err), Remedy: "move the record aside and remove the " + noun,
		})
	}
	return findings
}

// Wipe removes all pods and containers, running or not, and all else with an id of this
// server. It returns what remains: what could not be removed stays on record and is
// retried, by this server or the next. When ctx ends no further removal begins; those
// in progress are not interrupted.
func (e *Engine) Wipe(ctx context.Context) ([]audit.Finding, error) {
	all := e.sandboxes.All()
	errs := make([]error, len(all))
	var removals errgroup.Group
	removals.SetLimit(recoverWidth)
	for i, s := range all {
		removals.Go(func() error {
			if errs[i] = context.Cause(ctx); errs[i] == nil {
				ctx, cancel := context.WithTimeout(ctx, undoTime)
				defer cancel()
				errs[i] = e.RemoveSandbox(ctx, s.ID)
			}
			return nil
		})
	}
	_ = removals.Wait()
	found, err := e.audit.Verify(ctx, true)
	var left []audit.Finding
	for _, f := range found {
		if !f.Repaired {
			left = append(left, f)
		}
	}
	pods, _, _, readErr := e.records.Pods.Read()
	for id, rec := range pods {
		if _, err := e.deps.Runtimes.Get(rec.Handler); err != nil {
			left = append(left, audit.Finding{Object: "pod " + id, Wrong: err.Error(), Advice: "add the handler to runtime.handlers again; without it crius cannot stop the pod"})
		}
	}
	return left, errors.Join(append(errs, err, readErr)...)
}
