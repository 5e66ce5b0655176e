package pod

import (
	"sync"
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/retry"
	"github.com/crius-run/crius/internal/trace"
)

// counters grow from the start of the server.
type counters struct {
	oomKilled, monitorsLost, leftovers atomic.Uint64

	checkpoints checkpointCounter
	restored    atomic.Uint64 // bytes

	log struct {
		mu      sync.Mutex      // so that each container is counted exactly once, as present or as removed
		removed conmon.LogCount // by removed containers
	}
}

// Summary is what is on the node, and what has happened to it since the server started.
type Summary struct {
	Pods        map[cri.PodSandboxState]int
	Containers  map[cri.ContainerState]int
	Monitors    int          // of containers and of pods
	Unreachable int          // monitors that have not answered since the server was started
	Logs        int          // running containers whose logs lack what they write
	Cleanups    int          // objects whose cleanup did not finish and is retried
	Pending     []Pending    // the cleanups, by id
	Work        []trace.Work // under way, the longest first

	OOMKilled    uint64 // containers that the kernel killed when memory ran out
	MonitorsLost uint64
	Leftovers    uint64 // objects without a record that were found at the start

	EventsDropped uint64 // view.Hub.Dropped

	Checkpoints  []Checkpointing // under way, by name
	Checkpointed CheckpointCounts
	Restored     uint64 // bytes of the checkpoints from which pods were restored
}

// Pending is a cleanup that did not finish and is retried.
type Pending struct {
	ID    string    `json:"id"`             // of the object, after words that say what is to be done
	Name  string    `json:"name,omitempty"` // namespace and name of the pod, and the container's; empty: unknown
	Since time.Time `json:"since"`
	Err   string    `json:"error,omitempty"` // of the last attempt; empty: there was none yet
}

func (e *Engine) pending() []Pending {
	return mapped(e.cleanups.Pending(), func(p retry.Pending) Pending {
		shown := Pending{ID: p.Key, Name: e.names.of(p.Key), Since: p.Since}
		if p.Err != nil {
			shown.Err = fault.Text(p.Err)
		}
		return shown
	})
}

// Summary counts what is on the node.
func (e *Engine) Summary() Summary {
	s := Summary{
		Pods:         map[cri.PodSandboxState]int{},
		Containers:   map[cri.ContainerState]int{},
		Pending:      e.pending(),
		Work:         e.deps.Trace.Active(),
		OOMKilled:    e.counters.oomKilled.Load(),
		MonitorsLost: e.counters.monitorsLost.Load(),
		Leftovers:    e.counters.leftovers.Load(),

		EventsDropped: e.events.Dropped(),

		Checkpoints: e.checkpointing(), Checkpointed: e.counters.checkpoints.get(), Restored: e.counters.restored.Load(),
	}
	s.Cleanups = len(s.Pending)
	count := func(pid int, unreachable bool) {
		if pid != 0 {
			s.Monitors++
		}
		if unreachable {
			s.Unreachable++
		}
	}
	for _, pod := range e.sandboxes.All() {
		v := pod.View()
		s.Pods[v.State]++
		count(v.PID, pod.Now().unreachable)
	}
	for _, c := range e.containers.All() {
		v := c.View()
		s.Containers[v.State]++
		now := c.Now()
		count(v.PID, now.unreachable)
		if now.exit == nil && now.log != (conmon.LogTrouble{}) {
			s.Logs++
		}
	}
	return s
}
