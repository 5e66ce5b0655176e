package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
)

// This file is the one way back: a failed create, Remove and recovery all come here. Each
// function takes "already gone" for success, continues after an error as far as that is safe,
// and can be called again.

// teardown removes every trace of the container, the record last.
func (c *Container) teardown(ctx context.Context) error {
	c.shortening.Lock()
	c.Change(func(now *liveContainer) {
		now.Incomplete = now.Incomplete || now.Phase == records.Creating
		now.Phase = records.Removing
	})
	c.shortening.Unlock()
	c.Note(ctx)
	var errs []error
	if begun := c.Now().Checkpoint; begun != nil {
		if err := trace.Do(ctx, "abandon checkpoint", func(ctx context.Context) error { return c.endDump(ctx, begun) }); err != nil {
			errs = append(errs, fmt.Errorf("abandon checkpoint: %w", err))
		}
		if err := trace.Call(ctx, "remove checkpoint files", func() error { return c.removeUnfinished(begun) }); err != nil {
			slog.WarnContext(ctx, "files of an unfinished checkpoint stay, remove them by hand", "container", c.ID, "path", begun.Dir, "names", begun.Names, "err", err)
		}
	}
	deleteTask := func(ctx context.Context) error { return c.runtime.Delete(ctx, c.ref) }
	if err := trace.Do(ctx, "delete container", deleteTask); err != nil {
		errs = append(errs, fmt.Errorf("delete from runtime: %w", err))
	}
	if err := c.cpus.restore(ctx); err != nil {
		c.cpus.restoreLater(ctx, c.engine, err)
	}
	if task := c.Now().task; task != nil {
		task.Close() // not before: an open task reaps its monitor
	}
	if err := trace.Do(ctx, "remove root file system", c.roots.remove); err != nil {
		// While it is mounted below the run directory, that one must not be walked.
		return errors.Join(append(errs, fmt.Errorf("remove root file system: %w", err))...)
	}
	if err := errors.Join(errs...); err != nil {
		return err // the next try finds the monitor by the run directory
	}
	if c.Now().Incomplete {
		c.removeUnusedLog(ctx)
	}
	if err := removeRunDir(ctx, c.ref.Dir); err != nil {
		return err
	}
	c.sandbox.room.Free(c.ID)
	if err := c.Forget(ctx); err != nil {
		return err
	}
	c.engine.names.retire(c.ID)
	return nil
}

// removeUnusedLog removes the log that the monitor of a failed create has made, unless somebody
// has written to it. A kubelet that finds no container counts the files of logs to find out how
// often it has been started. A log that was there before stays, and so does one whose name has
// another container by now, which may have written nothing yet.
func (c *Container) removeUnusedLog(ctx context.Context) {
	name := records.NameOfContainer(c.sandbox.ID, c.plan.Config.M.GetMetadata())
	if owner, reserved := c.engine.containers.Reserve(name, c.ID); reserved {
		defer c.engine.containers.Drop(name, c.ID)
	} else if owner != c.ID {
		return
	}
	const clock = 100 * time.Millisecond // by which the kernel's time of a file may be behind
	info, err := os.Lstat(c.plan.LogPath)
	if err != nil || !info.Mode().IsRegular() || info.Size() > 0 || info.ModTime().Before(c.plan.CreatedAt.Add(-clock)) {
		return
	}
	if err := trace.Call(ctx, "remove unused log", func() error { return os.Remove(c.plan.LogPath) }); err != nil {
		slog.WarnContext(ctx, "empty log of a failed container creation not removed", "container", c.ID, "err", err)
	}
}

// errNetworkOwed says that everything of a pod is gone except for its network, which could not
// be released.
var errNetworkOwed = errors.New("network not released")

// teardown removes every trace of the pod, the record last. Its containers must be gone.
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
	s.engine.names.retire(s.ID)
	return nil
}

// release removes what a stopped pod does not need: its infra container, network, namespaces
// and mounts. A network that cannot be released does not hold up the rest; it stays on record
// and is retried.
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
	// Plugins release less without the namespace (bridge leaves its firewall chain), so it is
	// kept for the next try.
	if !s.Now().HasNetwork() {
		errs = append(errs, s.removeNamespaces(ctx))
	}
	return errors.Join(append(errs, s.unmount(ctx))...)
}

func (s *Sandbox) removeNamespaces(ctx context.Context) error {
	if err := trace.Call(ctx, "remove namespaces", func() error { return ns.Remove(s.plan.Namespaces) }); err != nil {
		return fmt.Errorf("remove namespaces: %w", err)
	}
	return nil
}

// unmount unmounts the pod's files.
func (s *Sandbox) unmount(ctx context.Context) error {
	var errs []error
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

// endCgroup removes a cgroup of the pod, and kills any process that someone has moved there.
func endCgroup(ctx context.Context, path string) error {
	killing, cancel := context.WithTimeout(ctx, leftoverTime)
	defer cancel()
	return errors.Join(cgroup.Kill(killing, path), cgroup.Remove(ctx, path))
}

// removeRunDir removes a directory in which nothing is mounted any more.
func removeRunDir(ctx context.Context, dir string) error {
	return trace.Call(ctx, "remove run directory", func() error { return mount.RemoveAll(dir) })
}
