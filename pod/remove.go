package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/crius-run/crius/pod/records"
)

// RemoveContainer kills the container if it runs, and removes it and its record. It is
// idempotent, and unknown ids are no error.
func (e *Engine) RemoveContainer(ctx context.Context, id string) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return doneIfAbsent(err)
	}
	return e.run(ctx, verb{"remove", c.ID}, c.remove)
}

func (c *Container) remove(ctx context.Context) error {
	if c.interruptCheckpoint() { // or criu would have to finish first
		if err := c.kill(ctx); err != nil {
			return fmt.Errorf("remove container %s: %w", c.ID, err)
		}
	}
	c.LockLife(ctx)
	defer c.Life.Unlock()
	if c.Now().Phase == records.Removing {
		return nil // an earlier call is at it
	}
	if err := c.kill(ctx); err != nil {
		return fmt.Errorf("remove container %s: %w", c.ID, err)
	}
	c.Tell() // its exit; watch may not have told it yet
	c.nri.Stopped(ctx)
	c.nri.Plugins.RemoveContainer(ctx, c.describe)
	c.countLog(ctx)
	if err := c.teardown(ctx); err != nil {
		slog.WarnContext(ctx, "cleanup after container removal incomplete, retrying", "container", c.ID, "err", err)
		c.sandbox.room.Keep(c.ID, c.use())
		c.engine.cleanups.Add(c.ID, c.teardown)
	}
	c.retire()
	c.sandbox.Change(func(pod *livePod) { pod.drop(c) })
	c.Change(func(now *liveContainer) { now.gone = true })
	c.Tell()
	slog.InfoContext(ctx, "container removed", "container", c.ID, "pod", c.sandbox.ID)
	return nil
}

// RemoveSandbox stops the pod, and removes its containers and its record. It is
// idempotent, and unknown ids are no error.
func (e *Engine) RemoveSandbox(ctx context.Context, id string) error {
	return e.onPod(ctx, "remove pod", id, (*Sandbox).remove)
}

func (s *Sandbox) remove(ctx context.Context) error {
	if s.Now().Phase == records.Removing {
		return nil // an earlier call is at it
	}
	if err := s.stop(ctx); err != nil {
		return err
	}
	var errs []error
	for _, c := range s.Now().containers {
		errs = append(errs, c.remove(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	s.Change(func(now *livePod) { now.Phase = records.Removing }) // first, so that plugins that connect from now on do not see it
	s.nri.Plugins.RemovePod(ctx, s.describe)
	if err := s.teardown(ctx); err != nil {
		slog.WarnContext(ctx, "cleanup after pod removal incomplete, retrying", "pod", s.ID, "err", err)
		s.engine.cleanups.Add(s.ID, s.teardown)
	}
	s.engine.sandboxes.Drop(records.NameOfPod(s.plan.Config.M.GetMetadata()), s.ID)
	s.Change(func(now *livePod) { now.gone = true })
	s.Tell()
	return nil
}

// dismantle removes a pod that readers cannot see any more, with its containers.
func (s *Sandbox) dismantle(ctx context.Context) error {
	for _, c := range s.Now().containers {
		if err := c.remove(ctx); err != nil {
			return err
		}
	}
	return s.teardown(ctx)
}
