package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
)

// StopContainer stops a container: it sends the stop signal, and SIGKILL once grace is over. It
// returns when the container is dead, when ctx ends, or with fault.Timeout if the container
// does not die of SIGKILL; the stop continues in any case. Unknown ids and dead containers are
// no error (CRI: StopContainer).
func (e *Engine) StopContainer(ctx context.Context, id string, grace time.Duration) error {
	c, err := e.containers.Find(id)
	if err != nil {
		return doneIfAbsent(err)
	}
	err = e.deps.Trace.Do(ctx, "stop", c.ID, func(ctx context.Context) error { return c.end(ctx, grace) })
	if err != nil {
		return fmt.Errorf("stop container %s: %w", c.ID, err)
	}
	c.nri.Stopped(ctx)
	return nil
}

// end stops the container, and kills the processes that remained when its first process ended.
func (c *Container) end(ctx context.Context, grace time.Duration) error {
	if err := c.stop.End(ctx, c.releasedBy(grace)); err != nil {
		return err
	}
	if exit := c.Now().exit; exit == nil || exit.Message == "" || c.ref.Cgroup == "" {
		return nil
	}
	return c.killLeftovers(ctx)
}

// kill is end without a grace period.
func (c *Container) kill(ctx context.Context) error {
	return trace.Do(ctx, "kill container", func(ctx context.Context) error { return c.end(ctx, 0) })
}

// StopSandbox kills the pod's containers and removes its network and namespaces. It is
// idempotent, and unknown ids are no error (CRI: StopPodSandbox). If the network cannot be
// released now, that is retried.
func (e *Engine) StopSandbox(ctx context.Context, id string) error {
	return e.onPod(ctx, "stop pod", id, (*Sandbox).stop)
}

// stop stops the pod; it wants Life held. It leaves a pod alone that is being removed: its
// record must not be written again.
func (s *Sandbox) stop(ctx context.Context) error {
	if p := s.Now().Phase; p == records.Removing || p == records.Stopped && !s.Now().HasNetwork() {
		return nil
	}
	started := time.Now()
	s.end()
	s.Publish()
	if err := s.killMembers(ctx); err != nil {
		return err
	}
	// From here on the pod cannot come back, even if the server dies: its address may soon be
	// another pod's.
	s.Change(func(now *livePod) { now.Phase = records.Stopping })
	s.Note(ctx)
	for _, c := range s.Now().containers {
		c.nri.Stopped(ctx)
	}
	s.nri.Stopped(ctx)
	if err := s.release(ctx); err != nil {
		return err
	}
	s.Change(func(now *livePod) { now.Phase = records.Stopped })
	noted := s.Note(ctx)
	s.Tell()
	slog.InfoContext(ctx, "pod stopped", "pod", s.ID, "took", time.Since(started))
	if s.Now().HasNetwork() || !noted {
		s.engine.cleanups.Add(s.ID, s.finishStop)
	}
	return nil
}

// end refuses new containers, cancels creations under way and waits until they are undone.
func (s *Sandbox) end() {
	s.Change(func(*livePod) { s.callOff(errPodEnding) })
	s.creating.Wait()
}

var errPodEnding = fmt.Errorf("the pod is being stopped: %w", fault.Precondition)

// killMembers kills all containers concurrently and waits until they are dead.
func (s *Sandbox) killMembers(ctx context.Context) error {
	members := s.Now().containers
	errs := make([]error, len(members))
	var wg panics.Group
	for i, c := range members {
		wg.Go(func() { errs[i] = c.kill(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// finishStop finishes a stop: it releases the network and records that the pod is stopped.
func (s *Sandbox) finishStop(ctx context.Context) error { return s.Finish(ctx, s.settleStop) }

// settleStop is finishStop with Life held.
func (s *Sandbox) settleStop(ctx context.Context) error {
	if err := s.detach(ctx); err != nil {
		return err
	}
	if err := trace.Call(ctx, "remove namespaces", func() error { return ns.Remove(s.plan.Namespaces) }); err != nil {
		return err
	}
	return s.Put(ctx)
}

// expire stops a pod that is dead already.
func (s *Sandbox) expire(ctx context.Context) error {
	s.LockLife(ctx)
	defer s.Life.Unlock()
	return s.stop(ctx)
}
