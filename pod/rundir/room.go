package rundir

import (
	"fmt"
	"sync"

	"github.com/crius-run/crius/internal/fault"
)

// Use is how much of a pod's room something uses, in bytes.
type Use struct {
	Files    int64 // in the run directory
	Requests int64 // of the server's memory, for as long as a container is on record
}

// Room is the limited space of one pod. Containers that are being created or removed, and
// commands that are being started, have claims; everything else is measured.
type Room struct {
	mu     sync.Mutex
	claims map[string]Use
}

// Unmeasured is how many bytes of files commands may claim at once without measuring the pod,
// on top of MaxPod: measuring costs more than the files of a usual command are worth.
const Unmeasured = 1 << 20

// Claim claims room for a container that is being created, or for a command that is being
// started. If there is not enough, the error is fault.Exhausted. The room stays claimed until
// Free; the caller frees it only when measure sees what was made.
func (r *Room) Claim(id string, need Use, measure func() Use) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var claimed Use
	for _, claim := range r.claims {
		claimed.Files += claim.Files
		claimed.Requests += claim.Requests
	}
	if need.Requests == 0 && claimed.Files+need.Files <= Unmeasured {
		r.keep(id, need)
		return nil
	}
	used := measure() // under the lock, or what is freed meanwhile would not be counted at all
	used.Files += claimed.Files
	used.Requests += claimed.Requests
	if used.Files+need.Files > MaxPod {
		return fmt.Errorf("its pod has %d bytes in the run directory, and it may need %d more; at most %d are allowed for a pod: use smaller environments, arguments, mounts and annotations, or remove containers that have exited: %w",
			used.Files, need.Files, MaxPod, fault.Exhausted)
	}
	if used.Requests+need.Requests > MaxPod {
		return fmt.Errorf("its request has %d bytes, and those of its pod's containers have %d; at most %d are allowed for a pod: use smaller environments, arguments, mounts and annotations, or remove containers that have exited: %w",
			need.Requests, used.Requests, MaxPod, fault.Exhausted)
	}
	r.keep(id, need)
	return nil
}

// Keep counts what a container still uses although it is not measured any more, until Free.
func (r *Room) Keep(id string, used Use) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keep(id, used)
}

func (r *Room) keep(id string, use Use) {
	if r.claims == nil {
		r.claims = map[string]Use{}
	}
	r.claims[id] = use
}

// Free ends the claim of a container, if it has one.
func (r *Room) Free(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.claims, id)
}
