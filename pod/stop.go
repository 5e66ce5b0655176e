package pod

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// stopper is a container's stop under way: the stop signal once, SIGKILL when
// the time is up. Whoever asks again with less grace brings the deadline
// forward; nobody can put it off.
type stopper struct {
	mu       sync.Mutex
	running  bool
	deadline time.Time
	sooner   chan struct{}
}

// ask notes deadline and reports whether the caller has to start the stop.
func (s *stopper) ask(deadline time.Time) (begin bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		s.running, s.deadline, s.sooner = true, deadline, make(chan struct{}, 1)
		return true
	}
	if deadline.Before(s.deadline) {
		s.deadline = deadline
		select {
		case s.sooner <- struct{}{}:
		default:
		}
	}
	return false
}

func (s *stopper) asked() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running
}

func (s *stopper) remaining() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Until(s.deadline)
}

// dieTime is how long a caller waits for a container that has been killed.
const dieTime = 30 * time.Second

// killAgain is how long a killed container may take before it is killed again
// and the operator is told.
const killAgain = 10 * time.Second

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
	err = e.deps.Trace.Do(ctx, "stop", c.id, func(ctx context.Context) error { return c.end(ctx, grace) })
	if err != nil {
		return fmt.Errorf("stop container %s: %w", c.id, err)
	}
	c.notifyStopped(ctx)
	return nil
}

// kill ends the container now.
func (c *Container) kill(ctx context.Context) error {
	return trace.Do(ctx, "kill", func(ctx context.Context) error { return c.end(ctx, 0) })
}

func (c *Container) end(ctx context.Context, grace time.Duration) error {
	select {
	case <-c.exited:
		return nil
	default:
	}
	if c.stop.ask(time.Now().Add(grace)) {
		// A container that never ran has nothing to say goodbye to.
		graceful := grace > 0 && c.view.Load().State == cri.ContainerState_CONTAINER_RUNNING
		ctx := context.WithoutCancel(ctx)
		c.engine.background.Go("stop container", func() {
			c.engine.background.Insist("stop container "+c.id, func() { c.stopAndKill(ctx, graceful) })
		})
	}
	expired := time.NewTimer(min(grace, math.MaxInt64-dieTime) + dieTime)
	defer expired.Stop()
	select {
	case <-c.exited:
		return nil
	case <-expired.C:
		return fmt.Errorf("not dead %s after SIGKILL, still trying: %s: %w", dieTime, c.undead(), fault.Timeout)
	case <-ctx.Done():
		return fmt.Errorf("not stopped yet, still trying: %w", context.Cause(ctx))
	case <-c.engine.background.Closing().Done():
		return errClosing
	}
}

// stopAndKill runs until the container is dead.
func (c *Container) stopAndKill(ctx context.Context, graceful bool) {
	wait := func() time.Duration { return 0 }
	if graceful {
		wait = c.stop.remaining
		signal := func(ctx context.Context) error { return c.now().task.Signal(ctx, unix.Signal(c.plan.StopNumber)) }
		if err := trace.Do(ctx, "stop signal", signal); err != nil {
			slog.WarnContext(ctx, "cannot send stop signal, SIGKILL follows after the grace period", "container", c.id, "err", err)
		}
	}
	killed := false
	for {
		timer := time.NewTimer(wait())
		select {
		case <-c.exited:
			timer.Stop()
			return
		case <-c.engine.background.Closing().Done():
			timer.Stop()
			return
		case <-c.stop.sooner:
			timer.Stop()
			continue
		case <-timer.C:
		}
		if killed && c.allDead() {
			c.endMonitor(ctx)
		}
		c.killOnce(ctx)
		killed = true
		wait = func() time.Duration { return killAgain }
	}
}

func (c *Container) killOnce(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, killAgain)
	defer cancel()
	if err := trace.Do(ctx, "SIGKILL", c.now().task.Kill); err != nil {
		slog.ErrorContext(ctx, "container not dead after SIGKILL", "container", c.id, "pid", c.now().task.PID(), "why", c.undead(), "err", err)
	}
}

// allDead tells whether a container has no process left whose monitor has not
// said so. One that waits for the disk may be writing down the exit, which nobody
// else knows.
func (c *Container) allDead() bool {
	processes, err := conmon.ReadProcesses(c.ref.Dir)
	if err != nil || conmon.Alive(processes.Container) || cgroup.Asleep(processes.Monitor.PID) != "" {
		return false // the process of a sandboxed task is the sandbox
	}
	pids, err := cgroup.Procs(c.ref.Cgroup)
	return err == nil && len(pids) == 0
}

// endMonitor ends a monitor that hangs, or lets one that does not record the
// exit: its container can be removed then.
func (c *Container) endMonitor(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, killAgain)
	defer cancel()
	slog.ErrorContext(ctx, "monitor did not report container exit, killing monitor", "container", c.id)
	if err := trace.Do(ctx, "end monitor", func(ctx context.Context) error { return conmon.Terminate(ctx, c.ref.Dir) }); err != nil {
		slog.ErrorContext(ctx, "monitor not dead after SIGKILL", "container", c.id, "err", err)
	}
}

// undead says why no end is known of a killed container.
func (c *Container) undead() string {
	if asleep := cgroup.Uninterruptible(c.ref.Cgroup); len(asleep) > 0 {
		return "in uninterruptible sleep, waiting for a device or a file server: " + strings.Join(asleep, ", ")
	}
	if processes, err := conmon.ReadProcesses(c.ref.Dir); err == nil {
		if asleep := cgroup.Asleep(processes.Monitor.PID); asleep != "" {
			return "its monitor has not recorded an exit and is blocked on a disk, perhaps that of the container log: " + asleep
		}
	}
	return "none of its processes is in uninterruptible sleep; the node may be overloaded"
}
