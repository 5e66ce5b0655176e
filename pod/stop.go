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

// StopContainer ends a container: its stop signal, and SIGKILL once grace is
// over. It returns when the container is dead, when the caller's time is up, or
// with fault.Timeout if the container does not die of SIGKILL; the stop goes on
// in any case. Unknown ids and containers that are dead are no
// error (CRI: StopContainer).
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

// end ends the container, and what it had left alive when its first process ended.
func (c *Container) end(ctx context.Context, grace time.Duration) error {
	if err := c.stop.End(ctx, grace); err != nil {
		return err
	}
	if exit := c.Now().exit; exit == nil || exit.Message == "" || c.ref.Cgroup == "" {
		return nil
	}
	return c.killLeftovers(ctx)
}

// kill is end without grace.
func (c *Container) kill(ctx context.Context) error {
	return trace.Do(ctx, "kill container", func(ctx context.Context) error { return c.end(ctx, 0) })
}

// StopSandbox kills the pod's containers and removes its network and namespaces. It is
// idempotent, and unknown ids are no error (CRI: StopPodSandbox). If the network cannot
// be removed now, that is retried.
func (e *Engine) StopSandbox(ctx context.Context, id string) error {
	return e.onPod(ctx, "stop pod", id, (*Sandbox).stop)
}

// stop wants Life held. A pod whose removal has begun is the removal's: its record
// must not be written again.
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
	// From here on the pod cannot come back, whoever dies: its address may be
	// another pod's soon.
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

// end refuses new containers, calls off those being created and waits until
// they are gone.
func (s *Sandbox) end() {
	s.Change(func(*livePod) { s.callOff(errPodEnding) })
	s.creating.Wait()
}

var errPodEnding = fmt.Errorf("the pod is being stopped: %w", fault.Precondition)

// killMembers kills all containers side by side and waits for their end.
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

// expire is the stop of a pod that is dead already.
func (s *Sandbox) expire(ctx context.Context) error {
	s.Life.Lock()
	defer s.Life.Unlock()
	return s.stop(ctx)
}
