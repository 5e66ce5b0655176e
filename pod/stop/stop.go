// Package stop ends a container: by its stop signal, by SIGKILL, and by the end of a
// monitor that does not report the exit.
package stop

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/background"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
)

// Stopper stops one container: it sends the stop signal once, or once more if the kernel
// discarded it and the program has become able to receive it since, and SIGKILL when the time
// is up. A caller with less grace brings the deadline forward; no one can put it off.
type Stopper struct {
	ID      string
	Ref     oci.Ref
	Signal  unix.Signal
	Task    func() oci.Task
	Running func() bool     // whether the container's program may run by now
	Exited  <-chan struct{} // closed when the container's end is known
	Work    *background.Group
	Killing func(context.Context) // called before the first SIGKILL

	Sandboxed bool // the task's process is the runtime sandbox, not the container's

	mu       sync.Mutex
	asked    bool
	deadline time.Time
	sooner   chan struct{}
}

// ask notes deadline and reports whether the caller has to start the stop.
func (s *Stopper) ask(deadline time.Time) (begin bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.asked {
		s.asked, s.deadline, s.sooner = true, deadline, make(chan struct{}, 1)
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

// Asked reports whether the stop has begun.
func (s *Stopper) Asked() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

func (s *Stopper) remaining() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Until(s.deadline)
}

// dieTime is how long a caller waits for a container that has been killed.
const dieTime = 30 * time.Second

// killAgain is how long a killed container may take before it is killed again and the operator
// is informed. It is longer than wire.OutputTime: a monitor of a dead container that has said nothing
// by then hangs.
const killAgain = 10 * time.Second

// Kill ends the container without a grace period.
func (s *Stopper) Kill(ctx context.Context) error {
	return trace.Do(ctx, "kill container", func(ctx context.Context) error { return s.End(ctx, 0) })
}

// End sends the stop signal, and SIGKILL once grace is over. It returns when the container is
// dead, when ctx ends, or with fault.Timeout if the container does not die of SIGKILL; the stop
// continues in any case.
func (s *Stopper) End(ctx context.Context, grace time.Duration) error {
	select {
	case <-s.Exited:
		return nil
	default:
	}
	if s.ask(time.Now().Add(grace)) {
		// A container that never ran needs no grace.
		graceful := grace > 0 && s.Running()
		ctx := context.WithoutCancel(ctx)
		s.Work.Go("stop container", func() {
			s.Work.Insist("stop container "+s.ID, func() { s.stopAndKill(ctx, graceful) })
		})
	}
	limit := min(grace, math.MaxInt64-dieTime) + dieTime
	wait := trace.Waiting{Name: "wait for container exit", For: "the container's processes", Until: time.Now().Add(limit), Patient: true}
	return trace.Wait(ctx, wait, func(ctx context.Context) error { return s.awaitExit(ctx, limit) })
}

// awaitExit waits until the container is dead, for at most limit.
func (s *Stopper) awaitExit(ctx context.Context, limit time.Duration) error {
	select {
	case <-s.Exited:
		return nil
	case <-time.After(limit):
		return fmt.Errorf("not dead %s after SIGKILL, still trying: %s: %w", dieTime, s.undead(), fault.Timeout)
	case <-ctx.Done():
		return fmt.Errorf("not stopped yet, still trying: %w", context.Cause(ctx))
	case <-s.Work.Closing().Done():
		return context.Cause(s.Work.Closing())
	}
}

// How long to wait before checking again whether a program that missed its stop signal has a
// handler by now: at first, and at most. A starting program gets the signal soon, and a program
// that never has a handler costs next to nothing.
const (
	lookSoon = 20 * time.Millisecond
	lookLate = time.Second
)

// stopAndKill runs until the container is dead.
func (s *Stopper) stopAndKill(ctx context.Context, graceful bool) {
	wait := func() time.Duration { return 0 }
	ignored, missed := "", false
	if graceful {
		wait = s.remaining
		ignored, missed = s.signal(ctx)
	}
	killed, look := false, lookSoon
	for {
		var again <-chan time.Time
		if missed && !killed {
			again = time.After(look)
		}
		select {
		case <-s.Exited:
			return
		case <-s.Work.Closing().Done():
			return
		case <-s.sooner:
			continue
		case <-again:
			look = min(2*look, lookLate)
			// Only a handler counts: a process that sleeps in sigwait (tini) or forks blocks the
			// signal now and then, and may have received it.
			if among(s.firstProcess(), "SigCgt", s.Signal) {
				ignored, missed = s.signal(ctx)
			}
			continue
		case <-time.After(wait()):
		}
		if graceful && !killed {
			slog.InfoContext(ctx, "container did not exit within the grace period, killing it", "container", s.ID, "signal", unix.SignalName(s.Signal), "why", cmp.Or(ignored, pending(s.firstProcess(), s.Signal)))
		}
		if killed && s.allDead() {
			s.endMonitor(ctx)
		}
		if !killed {
			s.Killing(ctx)
		}
		s.killOnce(ctx)
		killed = true
		wait = func() time.Duration { return killAgain }
	}
}

func (s *Stopper) killOnce(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, killAgain)
	defer cancel()
	if err := trace.Do(ctx, "send SIGKILL", s.Task().Kill); err != nil {
		slog.ErrorContext(ctx, "container not dead after SIGKILL", "container", s.ID, "pid", s.Task().PID(), "why", s.undead(), "err", err)
	}
}

// signal sends the stop signal. ignored says why the container's first process does not notice
// it; empty: it does, as far as can be told. missed: as far as can be told, the kernel has
// discarded it, since there was no handler before and after it was sent.
func (s *Stopper) signal(ctx context.Context) (ignored string, missed bool) {
	before := discarded(s.firstProcess(), s.Signal)
	send := func(ctx context.Context) error { return s.Task().Signal(ctx, s.Signal) }
	if err := trace.Do(ctx, "send stop signal", send); err != nil {
		slog.WarnContext(ctx, "cannot send stop signal, SIGKILL follows after the grace period", "container", s.ID, "err", err)
		return "", false
	}
	if cgroup.Thaw(s.Ref.Cgroup) { // or it would see the signal only when somebody else thaws it
		slog.InfoContext(ctx, "container was frozen, thawed it for its stop signal", "container", s.ID)
	}
	// Meanwhile the process may have executed another program, which has no handler yet; or the
	// handler has run and is gone.
	after := discarded(s.firstProcess(), s.Signal)
	ignored = cmp.Or(before, after)
	slog.DebugContext(ctx, "stop signal sent", "container", s.ID, "signal", unix.SignalName(s.Signal), "pid", s.Task().PID(), "why", ignored)
	return ignored, before == noHandler && after == noHandler
}

// firstProcess returns /proc/PID/status of the container's first process, empty if it cannot be
// read.
func (s *Stopper) firstProcess() string {
	if s.Sandboxed {
		return ""
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.Task().PID()))
	if err != nil {
		return ""
	}
	return string(text)
}

// allDead reports whether a container has no process left although its monitor has not reported
// that. A monitor that waits for the disk counts as working: it may be writing down the exit,
// which no one else knows.
func (s *Stopper) allDead() bool {
	processes, err := conmon.ReadProcesses(s.Ref.Dir)
	if err != nil || conmon.Alive(processes.Container) || cgroup.Asleep(processes.Monitor.PID) != "" {
		return false // the process of a sandboxed task is the runtime sandbox
	}
	pids, err := cgroup.Procs(s.Ref.Cgroup)
	return err == nil && len(pids) == 0
}

// endMonitor ends a monitor that hangs or does not record the exit. The container can be
// removed then.
func (s *Stopper) endMonitor(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, killAgain)
	defer cancel()
	slog.ErrorContext(ctx, "monitor did not report container exit, killing monitor", "container", s.ID)
	if err := trace.Do(ctx, "stop monitor", func(ctx context.Context) error { return conmon.Terminate(ctx, s.Ref.Dir) }); err != nil {
		slog.ErrorContext(ctx, "monitor not dead after SIGKILL", "container", s.ID, "err", err)
	}
}

// undead says why the end of a killed container is not known.
func (s *Stopper) undead() string {
	if file, thawed := cgroup.Frozen(s.Ref.Cgroup); file != "" {
		return "its cgroup is frozen, not by crius: thaw it (echo " + thawed + " > " + file + ")"
	}
	if asleep := cgroup.Uninterruptible(s.Ref.Cgroup); len(asleep) > 0 {
		return "in uninterruptible sleep, waiting for a device or a file server: " + strings.Join(asleep, ", ")
	}
	if processes, err := conmon.ReadProcesses(s.Ref.Dir); err == nil {
		if asleep := cgroup.Asleep(processes.Monitor.PID); asleep != "" {
			return "its monitor has not recorded an exit and is blocked on a disk, perhaps that of the container log: " + asleep
		}
	}
	return "none of its processes is in uninterruptible sleep; the node may be overloaded"
}
