package pod

import (
	"fmt"
	"iter"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/storage/checkpoint"
)

// Checkpointing is a checkpoint of a container that is under way, or its cleanup.
type Checkpointing struct {
	ID     string    `json:"id"` // of the container
	PodID  string    `json:"podId"`
	Name   string    `json:"name"` // namespace and name of the pod, and the container's
	Since  time.Time `json:"since"`
	Frozen bool      `json:"frozen"` // its processes do not run
}

// checkpointing lists the checkpoints under way by name.
func (e *Engine) checkpointing() []Checkpointing {
	list := []Checkpointing{}
	for _, c := range e.containers.All() {
		if d := c.dump.Load(); d != nil {
			list = append(list, Checkpointing{c.ID, c.sandbox.ID, e.names.of(c.ID), d.since, d.paused.Load()})
		}
	}
	slices.SortFunc(list, func(a, b Checkpointing) int { return strings.Compare(a.Name+a.ID, b.Name+b.ID) })
	return list
}

// CheckpointCounts are what checkpoints have cost since the server started.
type CheckpointCounts struct {
	Bytes uint64 // of containers in complete ones
	// How long containers were frozen, complete or not: their number, the sum, and by seconds how
	// many took no longer than that.
	Times  uint64
	Sum    time.Duration
	Within map[float64]uint64
}

// frozenSeconds are the limits by which CheckpointCounts.Within counts.
var frozenSeconds = []float64{0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300}

type checkpointCounter struct {
	mu     sync.Mutex
	counts CheckpointCounts
}

// thawed counts a container that was frozen for that long.
func (c *checkpointCounter) thawed(took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts.Times++
	c.counts.Sum += took
	for _, limit := range frozenSeconds {
		if took.Seconds() <= limit {
			if c.counts.Within == nil {
				c.counts.Within = map[float64]uint64{}
			}
			c.counts.Within[limit]++
		}
	}
}

func (c *checkpointCounter) wrote(bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts.Bytes += uint64(max(bytes, 0))
}

// get returns the counts. Each limit is in Within, even if nothing was.
func (c *checkpointCounter) get() CheckpointCounts {
	c.mu.Lock()
	defer c.mu.Unlock()
	counts := c.counts
	counts.Within = map[float64]uint64{}
	for _, limit := range frozenSeconds {
		counts.Within[limit] = c.counts.Within[limit]
	}
	return counts
}

// thawed counts how long the containers were frozen, once.
func (s *snapshot) thawed() {
	if s.frozen.IsZero() {
		return
	}
	for _, m := range s.members {
		m.engine.counters.checkpoints.thawed(time.Since(s.frozen))
	}
	s.frozen = time.Time{}
}

// checkRoom refuses a snapshot for which a disk has no space, while all containers run: with
// fault.Exhausted. It cannot know all that criu writes, so what it lets pass may still fail.
func (s *snapshot) checkRoom() error {
	var bytes uint64
	for _, m := range s.members {
		size, err := m.leastSize()
		if err != nil {
			return fmt.Errorf("container %s: size of the writable layer: %w", m.ID, err)
		}
		bytes += size
	}
	room, err := s.target.Room(s.dir)
	if err != nil {
		return err
	}
	rooms := []checkpoint.Room{room}
	if s.archive { // which is made of files below root
		for _, m := range s.members {
			room, err := checkpoint.RoomIn(m.engine.records.Containers.Path(m.ID))
			if err != nil {
				return err
			}
			rooms = append(rooms, room)
		}
	}
	return checkpoint.CheckRoom(bytes, rooms...)
}

// hidden returns the paths in the writable layer that are not the container's.
func (c *Container) hidden() ([]string, error) {
	paths, err := oci.MountPoints(c.ref.Dir)
	if err != nil || c.imageFormat() != checkpoint.FormatGvisor {
		return paths, err
	}
	// In which gVisor keeps what the container writes; its images have that, too.
	stores, err := filepath.Glob(filepath.Join(c.roots.own.Upper(), ".gvisor.filestore.*"))
	for _, store := range stores {
		paths = append(paths, "/"+filepath.Base(store))
	}
	return paths, err
}

// leastSize returns how many bytes a checkpoint of the container has at least: the memory that no file
// has, and the writable layer.
func (c *Container) leastSize() (uint64, error) {
	hidden, err := c.hidden()
	if err != nil {
		return 0, err
	}
	layer, err := checkpoint.LayerSize(c.roots.own.Upper(), hidden)
	return layer + c.meter.Anonymous(), err
}

// checkUnreachable refuses a directory in which a container can write: the node would sign for what that has put
// there. Containers that can write in root as well could take the key, and are trusted.
func (e *Engine) checkUnreachable(target *checkpoint.Target) error {
	place, err := target.Place()
	if err != nil {
		return err
	}
	root, err := mount.PlaceOf(e.cfg.StateDir)
	if err != nil {
		return err
	}
	for _, c := range e.containers.All() {
		for at := range c.writablePlaces() {
			if at.Holds(place) && !at.Holds(root) {
				return fmt.Errorf("container %s (%s) can write in it by one of its mounts, and could change files before they are signed; choose a directory that no container can write: %w",
					c.ID, e.names.of(c.ID), fault.Precondition)
			}
		}
	}
	return nil
}

// writablePlaces yields what the container can write outside of its own root file system: the volumes of its
// request, and what its first process sees, which volumes with links or propagated mounts lead to.
func (c *Container) writablePlaces() iter.Seq[mount.Place] {
	return func(yield func(mount.Place) bool) {
		for _, m := range c.plan.Config.M.GetMounts() {
			if m.GetReadonly() || m.GetHostPath() == "" {
				continue
			}
			if at, err := mount.PlaceOf(m.GetHostPath()); err == nil && !yield(at) {
				return
			}
		}
		task := c.Now().task
		if task == nil || task.PID() == 0 {
			return
		}
		// A process that has ended has no mounts.
		_ = mount.EachOf(task.PID(), func(m mount.Info) bool { return m.ReadOnly || yield(m.Place()) })
	}
}
