package pod

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/records"
)

// pods looks at all pods.
func (v *verification) pods(ctx context.Context) error {
	all := v.engine.sandboxes.All()
	networks := v.engine.networksOf(all)
	for _, s := range suspects(all, func(s *Sandbox) bool { return len(s.problems(ctx, networks)) > 0 }) {
		if !s.life.TryLock() {
			continue // a verb is at work on it
		}
		v.report.Add(ctx, "pod "+s.id, s.problems(ctx, v.engine.networksOf([]*Sandbox{s})))
		s.life.Unlock()
	}
	return ctx.Err()
}

// networksOf compares the networks of pods that should have one.
func (e *Engine) networksOf(pods []*Sandbox) map[string][]network.Damage {
	var attached []network.Attached
	for _, s := range pods {
		rec, gone := s.record(), s.now().gone
		if s.ending.Err() != nil || gone || rec.Phase != records.Ready || rec.Network == nil || rec.BootID != e.boot {
			continue
		}
		p := s.networkPod()
		if _, err := ns.Inode(p.NetNS); err != nil {
			continue // which is a problem of its own
		}
		attached = append(attached, network.Attached{Pod: p, Attachment: rec.Network, OwnStack: rec.Sandboxed})
	}
	return e.deps.Network.Verify(attached)
}

// problems are the ways in which the pod is not what its record says.
func (s *Sandbox) problems(ctx context.Context, networks map[string][]network.Damage) []audit.Problem {
	now := s.now()
	if now.gone {
		return nil
	}
	rec, ended := records.Pod{PodPlan: s.plan, PodState: now.PodState}, s.ending.Err() != nil
	var found []audit.Problem
	if _, err := s.engine.records.Pods.Get(s.id); err != nil {
		found = append(found, audit.Problem{Wrong: fmt.Sprintf("its record on disk is not usable: %v", err), Remedy: audit.Remedy{Text: "rewrite the record", Do: s.put}})
	}
	switch rec.Phase {
	case records.Creating:
		return append(found, s.engine.unfinished("its creation"))
	case records.Removing:
		return append(found, s.engine.unfinished("its removal"))
	case records.Stopping:
		return append(found, audit.Problem{Wrong: "stopping it did not finish", Remedy: audit.Remedy{Text: "stop it again", Do: s.stop}})
	case records.Stopped:
		return append(found, s.stoppedProblems(rec)...)
	}
	if ended {
		return found // the kubelet will stop it
	}
	return append(found, s.readyProblems(ctx, rec, networks[s.id])...)
}

// stoppedProblems: a stopped pod has given everything back.
func (s *Sandbox) stoppedProblems(rec records.Pod) []audit.Problem {
	if rec.Network != nil {
		if s.engine.cleanups.Has(s.id) {
			return nil // with its namespaces, and reported as a pending cleanup
		}
		return []audit.Problem{{Wrong: "it is stopped, but its network was not released", Remedy: audit.Remedy{Text: "retry the release", Do: s.settleStop}}}
	}
	var found []audit.Problem
	for _, path := range rec.Pins() {
		if _, err := ns.Inode(path); err == nil {
			found = append(found, audit.Problem{Wrong: "it is stopped, but a namespace is still pinned at " + path, Remedy: audit.Remedy{Text: "remove the namespace", Do: s.release}})
		}
	}
	return found
}

// lost are the reasons why a pod that is ready on record is dead; unseen is what
// could not be looked at, which is not to say that it is gone.
func (s *Sandbox) lost() (lost, unseen []error) {
	rec := s.record()
	if rec.BootID != s.engine.boot {
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
	if infra := s.now().infra; rec.Infra && infra != nil && exited(infra) {
		lost = append(lost, errInfraDead)
	}
	return lost, unseen
}

var errInfraDead = errors.New("its infra container is dead")

// readyProblems: what a ready pod consists of.
func (s *Sandbox) readyProblems(ctx context.Context, rec records.Pod, damage []network.Damage) []audit.Problem {
	over := audit.Remedy{Text: "stop it, so that the kubelet recreates it", Do: s.stop}
	var found []audit.Problem
	lost, notSeen := s.lost()
	if rec.Infra && rec.BootID == s.engine.boot && !slices.Contains(lost, errInfraDead) {
		switch alive, err := s.infraAlive(ctx); {
		case err != nil:
			notSeen = append(notSeen, fmt.Errorf("its infra container: %w", err))
		case !alive:
			lost = append(lost, errInfraDead)
		}
	}
	for _, err := range lost {
		found = append(found, audit.Problem{Wrong: err.Error(), Remedy: over})
	}
	if rec.BootID != s.engine.boot {
		return found
	}
	for _, err := range notSeen {
		found = append(found, unseen(err))
	}
	for _, d := range damage {
		p := audit.Problem{Wrong: d.Text, Remedy: over}
		if !d.Dead {
			p = audit.Problem{Wrong: d.Text, Advice: "delete the pod if it cannot be reached; crius leaves its containers running"}
		}
		found = append(found, p)
	}
	for _, text := range s.files.Missing() {
		found = append(found, audit.Problem{Wrong: text, Advice: "delete the pod: its running containers are not affected, but no new one can start"})
	}
	return found
}

// unseen is what could not be looked at, which is not to say that it is gone.
func unseen(err error) audit.Problem {
	return audit.Problem{Wrong: fmt.Sprintf("it cannot be checked: %v", err), Advice: "check again; if the error persists, look at its monitor process and the kernel log"}
}

// infraAlive asks the infra container's monitor.
func (s *Sandbox) infraAlive(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	task, err := s.runtime.Load(ctx, s.infraRef())
	if err != nil {
		return false, err
	}
	if task != s.now().infra {
		defer task.Close()
	}
	return !exited(task), nil
}

func exited(task oci.Task) bool {
	select {
	case <-task.Exited():
		return true
	default:
		return false
	}
}
