package rundir

import (
	"fmt"
	"sync"

	"github.com/crius-run/crius/internal/fault"
)

// Use is what something takes of a pod's room, in bytes.
type Use struct {
	Files    int64 // in the run directory
	Requests int64 // of the server's memory, for as long as a container is on record
}

// Room is what one pod may have. Containers that are being created or removed, and commands that
// are being started, have claims; what there is beside is measured where it is.
type Room struct {
	mu     sync.Mutex
	claims map[string]Use
}

// Unmeasured is how many bytes of files commands may claim at once without a look at what the
// pod has, beside MaxPod: to look costs more than the files of a usual command are worth.
const Unmeasured = 1 << 20

// Claim takes room for a container that is being created, or a command that is started. It is
// fault.Exhausted if there is none. The room is kept until Free, which is not called before
// measure sees what has been made.
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
	used := measure() // with the lock, or what is freed meanwhile would not count at all
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

// Keep counts what a container still uses that is not measured any more, until Free.
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
