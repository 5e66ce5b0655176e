package pod

import (
	"cmp"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/object"
)

// A kubelet takes the newest of several attempts of a pod or container for the current one. If the
// node's clock is set back, or it boots without a clock, a new attempt would be older than the dead
// one before: the kubelet would restart what runs, and ask for an attempt that exists, for as long
// as the old one is not removed (kubernetes/kubernetes#83050). It never collects a dead attempt from
// the future. So a record has the time that the clock showed, and readers see an attempt as created
// before the next one.

// podTime returns the time at which a pod is created: now. Readers see its earlier attempts before.
func (e *Engine) podTime(pod *cri.PodSandboxMetadata) time.Time {
	at := time.Now()
	inOrder(e.attemptsOfPods(func(m *cri.PodSandboxMetadata) bool {
		return sameButAttempt(m, pod) && m.GetAttempt() < pod.GetAttempt()
	}), at)
	return at
}

// containerTime returns the time at which a container of the pod is created: now. Readers see its
// earlier attempts before, also those in earlier attempts of the pod.
func (s *Sandbox) containerTime(ctr *cri.ContainerMetadata) time.Time {
	at, pod := time.Now(), s.plan.Config.M.GetMetadata()
	inOrder(s.engine.attemptsOfContainers(func(c *Container) bool {
		m, in := c.plan.Config.M.GetMetadata(), c.sandbox.plan.Config.M.GetMetadata()
		return m.GetName() == ctr.GetName() && sameButAttempt(in, pod) && attemptOf(in, m) < attemptOf(pod, ctr)
	}), at)
	return at
}

// orderAttempts has readers see the attempts of each pod and container in their order, when the
// server starts.
func (e *Engine) orderAttempts() {
	for _, of := range [][]attempt{
		e.attemptsOfPods(func(*cri.PodSandboxMetadata) bool { return true }),
		e.attemptsOfContainers(func(*Container) bool { return true }),
	} {
		slices.SortFunc(of, func(a, b attempt) int { return cmp.Compare(a.of, b.of) })
		for len(of) > 0 {
			n := slices.IndexFunc(of, func(a attempt) bool { return a.of != of[0].of })
			if n < 0 {
				n = len(of)
			}
			if n > 1 {
				inOrder(of[:n], time.Time{})
			}
			of = of[n:]
		}
	}
}

// attempt is one of several attempts of a pod or container.
type attempt struct {
	of      string // what it is an attempt of
	number  uint64
	created time.Time
	show    func(created time.Time)
}

// inOrder has readers see each attempt as created before the next one, and all before a time unless
// it is zero.
func inOrder(attempts []attempt, before time.Time) {
	slices.SortFunc(attempts, func(a, b attempt) int { return cmp.Compare(b.number, a.number) })
	before = before.Round(0) // what the clock shows: a process also knows how much time has passed since
	for _, a := range attempts {
		at := a.created.Round(0)
		if !before.IsZero() && !at.Before(before) {
			at = before.Add(-time.Nanosecond)
		}
		a.show(at)
		before = at
	}
}

func (e *Engine) attemptsOfPods(wanted func(*cri.PodSandboxMetadata) bool) (found []attempt) {
	for _, s := range e.sandboxes.All() {
		m := s.plan.Config.M.GetMetadata()
		if !wanted(m) {
			continue
		}
		show := func(created time.Time) {
			if !s.Now().created.Equal(created) {
				s.Change(func(now *livePod) { now.created = created })
				republish(&s.podObject)
			}
		}
		found = append(found, attempt{nameOfPod(m), uint64(m.GetAttempt()), s.plan.CreatedAt, show})
	}
	return found
}

func (e *Engine) attemptsOfContainers(wanted func(*Container) bool) (found []attempt) {
	for _, c := range e.containers.All() {
		if !wanted(c) {
			continue
		}
		m, pod := c.plan.Config.M.GetMetadata(), c.sandbox.plan.Config.M.GetMetadata()
		show := func(created time.Time) {
			if !c.Now().created.Equal(created) {
				c.Change(func(now *liveContainer) { now.created = created })
				republish(&c.containerObject)
			}
		}
		found = append(found, attempt{nameOfPod(pod) + "/" + m.GetName(), attemptOf(pod, m), c.plan.CreatedAt, show})
	}
	return found
}

func sameButAttempt(a, b *cri.PodSandboxMetadata) bool {
	return a.GetUid() == b.GetUid() && a.GetName() == b.GetName() && a.GetNamespace() == b.GetNamespace()
}

// nameOfPod names a pod in all its attempts.
func nameOfPod(m *cri.PodSandboxMetadata) string {
	return m.GetUid() + "/" + m.GetNamespace() + "/" + m.GetName()
}

func attemptOf(pod *cri.PodSandboxMetadata, ctr *cri.ContainerMetadata) uint64 {
	return uint64(pod.GetAttempt())<<32 | uint64(ctr.GetAttempt())
}

// republish shows readers a change of an object that they see already.
func republish[S object.State, R, V any](o *object.Object[S, R, V]) {
	if o.View() != nil {
		o.Publish()
	}
}
