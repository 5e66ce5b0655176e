package pod

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
)

// counters grow from the start of the server on.
type counters struct {
	oomKilled, monitorsLost, leftovers atomic.Uint64

	log struct {
		mu      sync.Mutex      // a container is counted by itself or as removed, never twice or not at all
		removed conmon.LogCount // what the removed ones have logged
	}
}

// countTime bounds how long a monitor may take to say how much it has logged.
const countTime = time.Second

// Logged is how many bytes the logs of all containers have grown by since the
// server started, and how many were discarded.
func (e *Engine) Logged(ctx context.Context) conmon.LogCount {
	var g errgroup.Group
	g.SetLimit(recoverWidth)
	for _, c := range e.containers.All() {
		g.Go(func() error { panics.Run(ctx, "count log", func() { c.countLog(ctx) }); return nil })
	}
	_ = g.Wait()
	log := &e.counters.log
	log.mu.Lock()
	defer log.mu.Unlock()
	total := log.removed
	for _, c := range e.containers.All() {
		total = total.Plus(c.logged.Now())
	}
	return total
}

func (c *Container) countLog(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, countTime)
	defer cancel()
	logged := c.Now().task.Logged(ctx)
	c.logged.Change(func(last *conmon.LogCount) { *last = logged })
}

// retire takes the container off the node's list and keeps what it had logged
// when it was last counted.
func (c *Container) retire() {
	log := &c.engine.counters.log
	log.mu.Lock()
	defer log.mu.Unlock()
	log.removed = log.removed.Plus(c.logged.Now())
	c.engine.containers.Drop(records.NameOfContainer(c.sandbox.ID, c.plan.Config.M.GetMetadata()), c.ID)
}

// Summary is what there is on the node, and what has happened to it since the
// server started.
type Summary struct {
	Pods        map[cri.PodSandboxState]int
	Containers  map[cri.ContainerState]int
	Monitors    int          // of containers and of pods
	Unreachable int          // monitors that have not answered since the server was started
	Cleanups    int          // objects whose cleanup could not be finished and is retried
	Work        []trace.Work // under way, the longest first

	OOMKilled    uint64 // containers that ended for want of memory
	MonitorsLost uint64
	Leftovers    uint64 // objects without a record that were found at the start

	EventsDropped uint64 // view.Hub.Dropped
}

// Summary counts.
func (e *Engine) Summary() Summary {
	s := Summary{
		Pods:         map[cri.PodSandboxState]int{},
		Containers:   map[cri.ContainerState]int{},
		Cleanups:     e.cleanups.Len(),
		Work:         e.deps.Trace.Active(),
		OOMKilled:    e.counters.oomKilled.Load(),
		MonitorsLost: e.counters.monitorsLost.Load(),
		Leftovers:    e.counters.leftovers.Load(),

		EventsDropped: e.events.Dropped(),
	}
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
		count(v.PID, c.Now().unreachable)
	}
	return s
}
