package pod

import (
	"sync/atomic"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/trace"
)

// counters grow from the start of the server on.
type counters struct {
	oomKilled, monitorsLost, leftovers atomic.Uint64
}

// Summary is what there is on the node, and what has happened to it since the
// server started.
type Summary struct {
	Pods       map[cri.PodSandboxState]int
	Containers map[cri.ContainerState]int
	Monitors   int          // of containers and of pods
	Debts      int          // objects whose clean-up is still owed
	Work       []trace.Work // under way, the longest first

	OOMKilled    uint64 // containers that ended for want of memory
	MonitorsLost uint64
	Leftovers    uint64 // objects without a record that were found at the start
}

// Summary counts.
func (e *Engine) Summary() Summary {
	s := Summary{
		Pods:         map[cri.PodSandboxState]int{},
		Containers:   map[cri.ContainerState]int{},
		Debts:        e.debtCount(),
		Work:         e.deps.Trace.Active(),
		OOMKilled:    e.counters.oomKilled.Load(),
		MonitorsLost: e.counters.monitorsLost.Load(),
		Leftovers:    e.counters.leftovers.Load(),
	}
	for _, v := range e.Sandboxes() {
		s.Pods[v.State]++
		if v.PID != 0 {
			s.Monitors++
		}
	}
	for _, v := range e.Containers() {
		s.Containers[v.State]++
		if v.State != cri.ContainerState_CONTAINER_EXITED {
			s.Monitors++
		}
	}
	return s
}
