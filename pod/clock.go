package pod

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A kubelet takes the newest of several attempts of a pod or container for the current one. If the
// node's clock is set back, or it boots without a clock, a new attempt would be older than the dead
// one before: the kubelet would restart what runs, and ask for an attempt that exists, for as long
// as the old one is not removed (kubernetes/kubernetes#83050).

// podTime returns the time at which a pod is created: now, or after its earlier attempts.
func (e *Engine) podTime(pod *cri.PodSandboxMetadata) time.Time {
	at := time.Now()
	for _, s := range e.sandboxes.All() {
		if sameButAttempt(s.plan.Config.M.GetMetadata(), pod) {
			at = after(at, s.plan.CreatedAt)
		}
	}
	return at
}

// containerTime returns the time at which a container of the pod is created: now, or after its
// earlier attempts, also in earlier attempts of the pod.
func (s *Sandbox) containerTime(name string) time.Time {
	at, pod := time.Now(), s.plan.Config.M.GetMetadata()
	for _, c := range s.engine.containers.All() {
		if c.plan.Config.M.GetMetadata().GetName() == name && sameButAttempt(c.sandbox.plan.Config.M.GetMetadata(), pod) {
			at = after(at, c.plan.CreatedAt)
		}
	}
	return at
}

func sameButAttempt(a, b *cri.PodSandboxMetadata) bool {
	return a.GetUid() == b.GetUid() && a.GetName() == b.GetName() && a.GetNamespace() == b.GetNamespace()
}

// after returns at, or a moment after earlier if that is later. It compares the times that the
// clock showed: a process also knows how much time has passed since, whatever the clock says.
func after(at, earlier time.Time) time.Time {
	if earlier = earlier.Round(0); at.Round(0).After(earlier) {
		return at
	}
	return earlier.Add(time.Nanosecond)
}
