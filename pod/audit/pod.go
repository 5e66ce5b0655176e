package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/records"
)

// pods checks all pods.
func (v *verification) pods(ctx context.Context) error {
	all := v.Node.Pods()
	networks := v.networks(all)
	for _, p := range suspects(all, func(p *Pod) bool { return len(v.podProblems(ctx, p, networks)) > 0 }) {
		v.confirmPod(ctx, p)
	}
	return ctx.Err()
}

// confirmPod checks a pod again, while no verb changes it.
func (v *verification) confirmPod(ctx context.Context, p *Pod) {
	p.WhileIdle(func() {
		v.report.Add(ctx, "pod "+p.ID, v.podProblems(ctx, p, v.networks([]*Pod{p})))
	})
}

// networks compares the networks of pods that should have one.
func (a *Auditor) networks(pods []*Pod) map[string][]network.Damage {
	var attached []network.Attached
	for _, p := range pods {
		now := p.Now()
		if now.Ended || now.Gone || now.Phase != records.Ready || now.Network == nil || p.Plan.BootID != a.Boot {
			continue
		}
		if _, err := ns.Inode(p.Network.NetNS); err != nil {
			continue // podProblems reports the namespace
		}
		attached = append(attached, network.Attached{Pod: p.Network, Attachment: now.Network, OwnStack: p.Plan.Sandboxed})
	}
	return a.Network.Verify(attached)
}

// podProblems returns the differences between the pod and its record. Networks are the damages
// to networks, by pod.
func (a *Auditor) podProblems(ctx context.Context, p *Pod, networks map[string][]network.Damage) []Problem {
	now := p.Now()
	if now.Gone {
		return nil
	}
	var found []Problem
	if _, err := a.Records.Pods.Get(p.ID); err != nil {
		found = append(found, Problem{Wrong: fmt.Sprintf("its record on disk is not usable: %v", err), Remedy: Remedy{Text: "rewrite the record", Do: p.Put}})
	}
	switch now.Phase {
	case records.Creating:
		return append(found, unfinished("its creation"))
	case records.Removing:
		return append(found, unfinished("its removal"))
	case records.Stopping:
		return append(found, Problem{Wrong: "stopping it did not finish", Remedy: Remedy{Text: "stop it again", Do: p.Stop}})
	case records.Stopped:
		return append(found, a.stoppedProblems(p, &now)...)
	}
	if now.Ended {
		return append(found, a.endedProblems(p, &now)...)
	}
	return append(found, a.readyProblems(ctx, p, &now, networks[p.ID])...)
}

// stoppedProblems returns what a stopped pod still has.
func (a *Auditor) stoppedProblems(p *Pod, now *PodNow) []Problem {
	if now.Network != nil {
		if a.Cleanups.Has(p.ID) {
			return nil // it keeps its namespaces, and is reported as a pending cleanup
		}
		return []Problem{{Wrong: "it is stopped, but its network was not released", Remedy: Remedy{Text: "retry the release", Do: p.SettleStop}}}
	}
	var found []Problem
	for _, path := range p.Plan.Pins() {
		if _, err := ns.Inode(path); err == nil {
			found = append(found, Problem{Wrong: "it is stopped, but a namespace is still pinned at " + path, Remedy: Remedy{Text: "remove the namespace", Do: p.Release}})
		}
	}
	return found
}

// endedProblems returns the problems of a pod that is not ready and has not been stopped. The
// kubelet will stop it; if its namespaces are gone although the node was not rebooted, the reason
// may end more pods.
func (a *Auditor) endedProblems(p *Pod, now *PodNow) (found []Problem) {
	if p.Plan.BootID != a.Boot {
		return nil
	}
	lost, _ := Lost(records.Pod{PodPlan: *p.Plan, PodState: now.PodState}, nil, a.Boot)
	for _, err := range lost {
		found = append(found, Problem{Wrong: fmt.Sprintf("it is not ready, because %v", err), Remedy: Remedy{Text: "stop it, so that the kubelet recreates it", Do: p.Stop}})
	}
	return found
}

// Lost returns the reasons why a pod that is ready on record is dead; unseen is what could not
// be checked, which does not mean that it is gone. Infra is its infra container, as far as that
// is known.
func Lost(rec records.Pod, infra oci.Task, boot string) (lost, unseen []error) {
	if rec.BootID != boot {
		return []error{errors.New("its record says ready, but the node was rebooted since")}, nil
	}
	for _, path := range rec.Pins() {
		inode, err := ns.Inode(path)
		switch {
		case errors.Is(err, fault.NotFound):
			lost = append(lost, err)
		case err != nil:
			unseen = append(unseen, err)
		case path == rec.Namespaces.Paths().Net && rec.Network != nil && rec.Network.NetNSInode != 0 && rec.Network.NetNSInode != inode:
			lost = append(lost, fmt.Errorf("%s is not the network namespace in which the pod's network was set up", path))
		}
	}
	if rec.Infra && infra != nil && oci.Exited(infra) {
		lost = append(lost, errInfraDead)
	}
	return lost, unseen
}

var errInfraDead = errors.New("its infra container is dead")

// readyProblems returns the problems of a pod that should be ready.
func (a *Auditor) readyProblems(ctx context.Context, p *Pod, now *PodNow, damage []network.Damage) []Problem {
	over := Remedy{Text: "stop it, so that the kubelet recreates it", Do: p.Stop}
	var found []Problem
	lost, notSeen := Lost(records.Pod{PodPlan: *p.Plan, PodState: now.PodState}, now.Infra, a.Boot)
	if p.Plan.Infra && p.Plan.BootID == a.Boot && !slices.Contains(lost, errInfraDead) {
		switch alive, err := p.infraAlive(ctx); {
		case err != nil:
			notSeen = append(notSeen, fmt.Errorf("its infra container: %w", err))
		case !alive:
			lost = append(lost, errInfraDead)
		}
	}
	for _, err := range lost {
		found = append(found, Problem{Wrong: fault.Text(err), Remedy: over})
	}
	if p.Plan.BootID != a.Boot {
		return found
	}
	for _, err := range notSeen {
		found = append(found, unseen(err))
	}
	for _, d := range damage {
		problem := Problem{Wrong: d.Text, Remedy: over}
		if !d.Dead {
			problem = Problem{Wrong: d.Text, Advice: "delete the pod if it cannot be reached; crius leaves its containers running"}
		}
		found = append(found, problem)
	}
	if p.Plan.Origin != nil {
		if _, err := p.Runtime.Probe(ctx); errors.Is(err, fault.Unavailable) {
			found = append(found, Problem{Wrong: fault.Text(err), Advice: "its containers run on and can be stopped; commands and new containers fail until the runtime is back"})
		}
	}
	for _, text := range p.Files.Missing() {
		found = append(found, Problem{Wrong: text, Advice: "its running containers are not affected, and the next one that is created brings it back"})
	}
	return found
}

// unseen is the problem of something that could not be checked, which does not mean that it is
// gone.
func unseen(err error) Problem {
	return Problem{Wrong: fmt.Sprintf("it cannot be checked: %v", err), Advice: "check again; if the error persists, look at its monitor process and the kernel log"}
}

// infraAlive asks the infra container's monitor.
func (p *Pod) infraAlive(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	task, err := p.Runtime.Load(ctx, p.Infra)
	if err != nil {
		return false, err
	}
	if task != p.Now().Infra {
		defer task.Close()
	}
	return !oci.Exited(task), nil
}
