package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/retry"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// This file is the one way back. Each function takes "already gone" for
// success, goes on after an error as far as that is safe, and can be called
// again; a failed create, Remove and recovery all come here.

// teardown removes every trace of the container, the record last.
func (c *Container) teardown(ctx context.Context) error {
	c.shortening.Lock()
	c.Change(func(now *liveContainer) { now.Phase = records.Removing })
	c.shortening.Unlock()
	c.Note(ctx)
	var errs []error
	deleteTask := func(ctx context.Context) error { return c.runtime.Delete(ctx, c.ref) }
	if err := trace.Do(ctx, "delete container", deleteTask); err != nil {
		errs = append(errs, fmt.Errorf("delete from runtime: %w", err))
	}
	if err := c.cpus.restore(ctx); err != nil {
		c.cpus.restoreLater(ctx, c.engine, err)
	}
	if task := c.Now().task; task != nil {
		task.Close() // not before: it is the task that buries the monitor
	}
	if err := trace.Do(ctx, "remove root file system", c.roots.remove); err != nil {
		// With it still mounted below the run directory, that must not be walked.
		return errors.Join(append(errs, fmt.Errorf("remove root file system: %w", err))...)
	}
	if err := errors.Join(errs...); err != nil {
		return err // the next try needs the run directory, to find the monitor
	}
	if err := removeRunDir(ctx, c.ref.Dir); err != nil {
		return err
	}
	c.sandbox.room.Free(c.ID)
	return c.Forget(ctx)
}

// errNetworkOwed is what teardown of a pod says when all is gone but the
// network could not be given back.
var errNetworkOwed = errors.New("network not released")

// teardown removes every trace of the pod, the record last. The members must
// be gone.
func (s *Sandbox) teardown(ctx context.Context) error {
	s.Change(func(now *livePod) { now.Phase = records.Removing })
	s.Note(ctx)
	if err := s.release(ctx); err != nil {
		return err
	}
	if err := removeRunDir(ctx, s.files.Dir); err != nil {
		return err
	}
	if s.Now().HasNetwork() {
		return fmt.Errorf("pod %s: %w: %w", s.ID, errNetworkOwed, s.Now().detachErr)
	}
	if err := s.Forget(ctx); err != nil {
		return err
	}
	s.engine.labels.Levels.Free(s.ID)
	return nil
}

// release gives back what a stopped pod does not need: its infra container,
// network, namespaces and mounts. A network that cannot be given back does not
// hold up the rest; it stays in the record, to be retried.
func (s *Sandbox) release(ctx context.Context) error {
	var errs []error
	if s.plan.Infra {
		ref := s.infraRef()
		ref.Last = s.Now().Phase == records.Removing
		err := trace.Do(ctx, "delete container", func(ctx context.Context) error { return s.runtime.Delete(ctx, ref) })
		if err != nil {
			errs = append(errs, fmt.Errorf("delete infra container: %w", err))
		}
		if infra := s.Now().infra; infra != nil {
			infra.Close()
		}
	}
	if s.plan.NeedsNetworkCgroup() {
		if err := trace.Call(ctx, "remove cgroup", func() error { return endCgroup(ctx, s.infraRef().Cgroup) }); err != nil {
			errs = append(errs, fmt.Errorf("remove cgroup: %w", err))
		}
	}
	if err := trace.Do(ctx, "detach network", s.detach); err != nil {
		slog.WarnContext(ctx, "pod network not removed, retrying", "pod", s.ID, "err", err)
	}
	// Plugins give back less without the namespace (bridge leaves its firewall
	// chain), so it is kept for the next try.
	if !s.Now().HasNetwork() {
		if err := trace.Call(ctx, "remove namespaces", func() error { return ns.Remove(s.plan.Namespaces) }); err != nil {
			errs = append(errs, fmt.Errorf("remove namespaces: %w", err))
		}
	}
	if err := trace.Call(ctx, "unmount shm", func() error { return mount.Unmount(s.files.Shm()) }); err != nil {
		errs = append(errs, fmt.Errorf("unmount shm: %w", err))
	}
	if s.plan.OwnFiles {
		if err := trace.Call(ctx, "unmount pod files", func() error { return mount.Unmount(s.files.Root()) }); err != nil {
			errs = append(errs, fmt.Errorf("unmount pod files: %w", err))
		}
	}
	return errors.Join(errs...)
}

// endCgroup removes a cgroup of the pod's own, with any process that somebody has put there.
func endCgroup(ctx context.Context, path string) error {
	killing, cancel := context.WithTimeout(ctx, leftoverTime)
	defer cancel()
	return errors.Join(cgroup.Kill(killing, path), cgroup.Remove(ctx, path))
}

// finishStop does what is left of a stop: it gives back the network, and writes
// down that the pod is stopped.
func (s *Sandbox) finishStop(ctx context.Context) error { return s.Finish(ctx, s.settleStop) }

// settleStop wants Life held.
func (s *Sandbox) settleStop(ctx context.Context) error {
	if err := s.detach(ctx); err != nil {
		return err
	}
	if err := trace.Call(ctx, "remove namespaces", func() error { return ns.Remove(s.plan.Namespaces) }); err != nil {
		return err
	}
	return s.Put(ctx)
}

// sweep removes what bears an id that has no record, of a container or of a pod.
func sweep(ctx context.Context, e *Engine, id string) error {
	return errors.Join(sweepContainer(ctx, e, id), sweepSandbox(ctx, e, id))
}

// deleteFromAny deletes a container of which no record says to which handler it belongs: all
// are asked.
func deleteFromAny(ctx context.Context, e *Engine, ref oci.Ref) error {
	var errs []error
	for _, name := range e.deps.Runtimes.Names() {
		runtime, err := e.deps.Runtimes.Get(name)
		if err == nil {
			err = trace.Do(ctx, "delete container", func(ctx context.Context) error { return runtime.Delete(ctx, ref) })
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// sweepContainer removes what an id without a record left in the run directory.
func sweepContainer(ctx context.Context, e *Engine, id string) error {
	ref := e.containerRef(id, records.ContainerPlan{})
	errs := []error{deleteFromAny(ctx, e, ref)}
	rootfs := storage.Rootfs{ID: id, Dir: e.records.Containers.Path(id), Target: ref.Rootfs()}
	removeRoot := func(ctx context.Context) error {
		return errors.Join(e.deps.Images.RemoveRootfs(ctx, rootfs), mount.UnmountBelow(ref.Dir))
	}
	if err := trace.Do(ctx, "remove root file system", removeRoot); err != nil {
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, removeRunDir(ctx, ref.Dir))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return e.records.Containers.Delete(ctx, id)
}

// sweepSandbox is sweepContainer for a pod. Its network is beyond reach: only
// the record knew how it was made.
func sweepSandbox(ctx context.Context, e *Engine, id string) error {
	plan := records.PodPlan{OwnFiles: true, Namespaces: ns.Spec{Dir: e.cfg.NamespacesDir, Name: blueprint.PinPrefix + id}}
	s := &Sandbox{podObject: podObject{ID: id}, engine: e, plan: plan, files: e.cfg.filesOf(id, &plan)}
	errs := []error{deleteFromAny(ctx, e, s.infraRef()), s.release(ctx)}
	if err := mount.UnmountBelow(s.files.Dir); err != nil {
		return errors.Join(append(errs, err)...) // and nothing is deleted through a mount
	}
	errs = append(errs, removeRunDir(ctx, s.files.Dir))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return e.records.Pods.Delete(ctx, id)
}

// removeRunDir removes a directory of which nothing is needed any more, and in
// which no directory is a mount point any more.
func removeRunDir(ctx context.Context, dir string) error {
	return trace.Call(ctx, "remove run directory", func() error { return mount.RemoveAll(dir) })
}

// undoTime bounds an undo, which runs when the caller may be long gone.
const undoTime = 2 * time.Minute

func undoContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.WithoutCancel(ctx), undoTime,
		fmt.Errorf("cleanup did not finish within %s: %w", undoTime, fault.Timeout))
}

const (
	retryMin = time.Second
	retryMax = time.Minute
)

// newCleanups is the queue of what could not be finished of an object: its
// teardown, as a rule, or the record of a start. The engine's end interrupts it;
// the next engine finds the work by the records.
func newCleanups(e *Engine) *retry.Queue {
	return retry.New(e.background.Closing(), retry.Config{
		Width: recoverWidth, Slot: 5 * time.Second, First: retryMin, Max: retryMax, Limit: undoTime,
		Attempt: func(ctx context.Context, id string, work retry.Work) error {
			err := e.deps.Trace.Do(ctx, "clean up", id, work)
			if err == nil {
				slog.InfoContext(ctx, "cleanup finished", "id", id)
			}
			return err
		},
		Failed: func(id string, err error) { slog.Warn("cleanup incomplete, retrying", "id", id, "err", err) },
	})
}

// until is ctx until another context ends, with the cause of that.
func until(ctx, end context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(end, func() { cancel(context.Cause(end)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// causedBy puts the reason for which ctx has ended before an error of work that ended
// with it: libraries report no more than that it was cancelled. That error is for people
// alone: callers would take it for a failure of the step that met the end.
func causedBy(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w (%s)", cause, err.Error())
	}
	return err
}
