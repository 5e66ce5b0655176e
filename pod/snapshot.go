package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage/checkpoint"
)

// snapshot is a checkpoint of containers as they are at one moment. It is on record before the first
// of them is frozen, so that the next server resumes them if this one dies (endCheckpoint).
type snapshot struct {
	target  *checkpoint.Target
	dir     string // its path
	members []*member
	archive bool      // its only product has its own name when it is complete
	shm     string    // the pod's /dev/shm, which criu does not write down; empty: it is left out
	at      time.Time // when all were frozen
	frozen  time.Time // since when they are being frozen; zero: they run
	held    []func()  // let the commands of containers go on
}

// member is a container of a snapshot.
type member struct {
	*Container
	part       checkpoint.Part
	unfinished []string // names in the directory of the snapshot until it is complete
}

// dumping is a checkpoint of a container that is under way.
type dumping struct {
	cancel context.CancelCauseFunc
	paused atomic.Bool
	since  time.Time
	done   chan struct{} // closed at its end
}

// begin makes d the checkpoint of the container, and reports whether there was none.
func (c *Container) begin(d *dumping) bool {
	d.done, d.since = make(chan struct{}), time.Now()
	return c.dump.CompareAndSwap(nil, d)
}

// leave is the end of d.
func (c *Container) leave(d *dumping) {
	c.dump.CompareAndSwap(d, nil)
	close(d.done)
}

// take freezes the containers, writes their parts and resumes them, then has finish write the rest.
// Whatever happens, all run when it returns, and a failure leaves nothing in the directory.
func (s *snapshot) take(ctx context.Context, finish func(context.Context) error) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// One order for all, since each snapshot holds the Lives of several containers.
	locked := slices.SortedFunc(slices.Values(s.members), func(a, b *member) int { return strings.Compare(a.ID, b.ID) })
	for _, m := range locked {
		d := &dumping{cancel: cancel}
		if !m.begin(d) {
			return fmt.Errorf("container %s: %w", m.ID, errTwice)
		}
		defer m.leave(d)
		wait := trace.Waiting{Name: "wait for other operation", For: "another operation on " + m.ID}
		err := trace.Wait(ctx, wait, func(ctx context.Context) error {
			if !poll.Until(ctx, 10*time.Millisecond, m.Life.TryLock) {
				return causedBy(ctx, context.Cause(ctx))
			}
			return nil
		})
		if err != nil {
			return err
		}
		defer m.Life.Unlock()
	}
	for _, m := range s.members {
		if err := cmp.Or(m.endCheckpoint(ctx), m.mayCheckpoint(ctx)); err != nil {
			return err
		}
	}
	if err := trace.Call(ctx, "check free space", s.checkRoom); err != nil {
		return err
	}
	defer s.release()
	if err := trace.Do(ctx, "hold commands", s.hold); err != nil {
		return causedBy(ctx, err)
	}
	defer func() { err = errors.Join(err, s.conclude(ctx, err == nil)) }()
	if err := s.record(ctx); err != nil {
		return err
	}
	if err := s.capture(ctx); err != nil {
		return causedBy(ctx, err)
	}
	s.release()
	if err := trace.Do(ctx, "write checkpoint", finish); err != nil {
		return causedBy(ctx, err)
	}
	for _, m := range s.members {
		m.engine.counters.checkpoints.wrote(m.part.Size())
	}
	return nil
}

// conclude ends the snapshot, complete or not.
func (s *snapshot) conclude(ctx context.Context, complete bool) error {
	ctx, cancel := undoContext(ctx)
	defer cancel()
	if !complete {
		s.resumeAll(ctx)
		s.thawed()
	}
	var errs []error
	for _, m := range s.members {
		errs = append(errs, m.concludeCheckpoint(ctx, complete))
	}
	err := errors.Join(errs...)
	if err == nil || !complete {
		return err
	}
	if s.archive {
		slog.WarnContext(ctx, "cleanup after a checkpoint incomplete, retrying", "path", s.dir, "err", err)
		return nil
	}
	// What is on record would have the next server remove the parts.
	for _, m := range s.members {
		err = errors.Join(err, s.target.Remove(m.unfinished...))
	}
	return err
}

// resumeAll resumes what a failure has left frozen: none stays so while files of others are removed.
// The end of each checkpoint repeats it, and reports errors.
func (s *snapshot) resumeAll(ctx context.Context) {
	var all panics.Group
	for _, m := range s.members {
		if m.Now().Checkpoint != nil {
			all.Go(func() { _ = m.resume(ctx) })
		}
	}
	all.Wait()
}

// record writes down what a server must undo that finds the snapshot unfinished.
func (s *snapshot) record(ctx context.Context) error {
	device, inode, err := s.target.Identity()
	if err != nil {
		return err
	}
	for _, m := range s.members {
		group, err := oci.DumpCgroup(m.ID)
		if err != nil {
			return err
		}
		m.Change(func(now *liveContainer) {
			now.Checkpoint = &records.Checkpoint{Since: time.Now(), Cgroup: group, Dir: s.dir, Device: device, Inode: inode, Names: m.unfinished}
		})
		if err := errors.Join(m.Put(ctx), m.Sync()); err != nil {
			return err
		}
	}
	return nil
}

// capture has all containers frozen while it writes their parts.
func (s *snapshot) capture(ctx context.Context) error {
	for _, m := range s.members {
		if err := trace.Call(ctx, "make checkpoint directory", m.part.Make); err != nil {
			return err
		}
	}
	began := time.Now()
	s.frozen = began
	if err := trace.Do(ctx, "freeze containers", s.freeze); err != nil {
		return err
	}
	s.at = time.Now()
	for _, m := range s.members {
		if err := m.write(ctx, s.at); err != nil {
			return fmt.Errorf("container %s: %w", m.ID, overtaken(ctx, m.Now().task, err))
		}
	}
	if s.shm != "" {
		if err := trace.Do(ctx, "copy shared memory", func(ctx context.Context) error { return s.target.PutTree(ctx, checkpoint.Shm, s.shm) }); err != nil {
			return fmt.Errorf("copy /dev/shm of the pod: %w", err)
		}
	}
	if err := ctx.Err(); err != nil { // a stop has thawed some of them
		return err
	}
	for _, m := range s.members {
		if err := m.resume(ctx); err != nil {
			return err
		}
	}
	s.thawed()
	for _, m := range s.members {
		slog.InfoContext(ctx, "container checkpointed", "container", m.ID, "pod", m.sandbox.ID, "frozen", time.Since(began))
	}
	return nil
}

// hold holds the commands of all containers.
func (s *snapshot) hold(ctx context.Context) error {
	for _, m := range s.members {
		release, err := m.Now().task.Hold(ctx)
		if err != nil {
			return fmt.Errorf("container %s: %w", m.ID, err)
		}
		s.held = append(s.held, release)
	}
	return nil
}

// release is the end of hold.
func (s *snapshot) release() {
	for _, release := range s.held {
		release()
	}
	s.held = nil
}

// freeze freezes all containers at the same time.
func (s *snapshot) freeze(ctx context.Context) error {
	errs := make([]error, len(s.members))
	var all panics.Group
	for i, m := range s.members {
		m.freezes.Add(1)
		m.dump.Load().paused.Store(true)
		all.Go(func() { errs[i] = m.Now().task.Pause(ctx) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// write writes the part of a frozen container.
func (m *member) write(ctx context.Context, at time.Time) error {
	dump := oci.Dump{Images: m.part.Images(), Work: m.part.Dir, Cgroup: m.Now().Checkpoint.Cgroup}
	err := trace.Do(ctx, "dump container", func(ctx context.Context) error {
		defer trace.For(ctx, "criu")()
		return m.Now().task.Dump(ctx, dump)
	})
	if err == nil {
		err = m.checkAlone(m.Now().task) // another one may have been created meanwhile
	}
	if err != nil {
		return err
	}
	hidden, err := m.hidden()
	if err != nil {
		return err
	}
	upper := m.roots.own.Upper()
	err = trace.Do(ctx, "copy writable layer", func(ctx context.Context) error { return m.part.PutLayer(ctx, upper, hidden) })
	if err != nil {
		return fmt.Errorf("copy writable layer: %w", err)
	}
	return trace.Call(ctx, "describe container", func() error { return m.putConfig(m.part, at) })
}

// resume resumes the container.
func (c *Container) resume(ctx context.Context) error {
	begun := c.Now().Checkpoint
	err := trace.Do(ctx, "resume container", func(ctx context.Context) error {
		defer trace.For(ctx, "criu")()
		return c.endDump(ctx, begun)
	})
	if d := c.dump.Load(); d != nil && err == nil {
		d.paused.Store(false)
	}
	return err
}

// endDump waits for criu and resumes the container; its monitor need not answer for that.
func (c *Container) endDump(ctx context.Context, begun *records.Checkpoint) error {
	return c.runtime.Unreachable(c.ref).EndDump(ctx, begun.Cgroup)
}

// concludeCheckpoint ends a checkpoint, complete or not, or has that retried.
func (c *Container) concludeCheckpoint(ctx context.Context, complete bool) error {
	if complete {
		c.Change(func(now *liveContainer) {
			whole := *now.Checkpoint
			whole.Names = nil
			now.Checkpoint = &whole
		})
	}
	err := c.endCheckpoint(ctx)
	if err == nil {
		return nil
	}
	c.engine.cleanups.Add(checkpointOf(c.ID), c.finishCheckpoint)
	return fmt.Errorf("cleanup after the checkpoint of container %s incomplete, retrying: %w", c.ID, err)
}

func checkpointOf(id string) string { return "checkpoint of " + id }

// finishCheckpoint is endCheckpoint for a container that nobody works on.
func (c *Container) finishCheckpoint(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	d := &dumping{cancel: cancel}
	d.paused.Store(true)
	if c.begin(d) {
		defer c.leave(d)
	}
	return c.Finish(ctx, c.endCheckpoint)
}

// endCheckpoint resumes the container and removes what an unfinished checkpoint has left, the record
// last. It can be called again. It wants Life held.
func (c *Container) endCheckpoint(ctx context.Context) error {
	begun := c.Now().Checkpoint
	if begun == nil {
		return nil
	}
	// A removal kills the container meanwhile, and criu ends.
	if err := c.resume(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	if netns := c.sandbox.plan.Namespaces.Paths().Net; netns != "" && len(begun.Names) > 0 {
		unlock := func(ctx context.Context) error { return c.engine.deps.Network.Unlock(ctx, netns) }
		if err := trace.Do(ctx, "unlock network", unlock); err != nil {
			return fmt.Errorf("remove the firewall rules of criu: %w", err)
		}
	}
	if err := trace.Call(ctx, "remove checkpoint files", func() error { return c.removeUnfinished(begun) }); err != nil {
		return err
	}
	c.Change(func(now *liveContainer) { now.Checkpoint = nil })
	if err := c.Put(ctx); err != nil {
		c.Change(func(now *liveContainer) { now.Checkpoint = begun })
		return err
	}
	return nil
}

// removeUnfinished removes the files of a checkpoint, unless another directory has the name of its own
// by now.
func (c *Container) removeUnfinished(begun *records.Checkpoint) error {
	err := os.RemoveAll(c.partDir())
	if len(begun.Names) == 0 {
		return err
	}
	target, openErr := checkpoint.OpenTarget(begun.Dir)
	if errors.Is(openErr, fault.NotFound) || errors.Is(openErr, fault.Precondition) {
		return err
	}
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	defer target.Close()
	device, inode, statErr := target.Identity()
	if same := inode == begun.Inode && (begun.Device == 0 || device == begun.Device); statErr != nil || !same {
		return errors.Join(err, statErr)
	}
	return errors.Join(err, target.Remove(begun.Names...))
}
