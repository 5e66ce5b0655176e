package stream

import (
	"log/slog"
	"maps"
	"sync"
	"time"
)

// Why a session or a connection was refused, for metrics.
const (
	refusedContainer = "container" // api.stream_max_sessions_per_container
	refusedNode      = "node"      // api.stream_max_sessions, or the part of it that is kept for others
	refusedPending   = "pending"   // too many wait for their client
	refusedForward   = "forward"   // too many connections into pods
)

// warnInterval is how often the log says that something is refused, for each reason.
const warnInterval = time.Minute

// refusals counts and logs what is refused.
type refusals struct {
	mu     sync.Mutex
	counts map[string]uint64 // by reason, of which all are there
	warned map[string]time.Time
}

func newRefusals() *refusals {
	return &refusals{
		counts: map[string]uint64{refusedContainer: 0, refusedNode: 0, refusedPending: 0, refusedForward: 0},
		warned: make(map[string]time.Time),
	}
}

func (r *refusals) add(reason string, p party, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts[reason]++
	if last, ok := r.warned[reason]; ok && time.Since(last) < warnInterval {
		return
	}
	r.warned[reason] = time.Now()
	slog.Warn("session refused: too many", "namespace", p.namespace, "target", p.target, "err", err)
}

func (r *refusals) snapshot() map[string]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.counts)
}
