package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/view"
)

// This file is where facts change and views are made of them.

// livePod is what changes of a pod.
type livePod struct {
	records.PodState
	infra       oci.Task     // nil: there is none, or none yet
	unreachable bool         // the monitor of infra has not answered since the server was started
	containers  []*Container // replaced, never modified
	gone        bool         // removed
	detachErr   error        // why the network could not be given back when that was last tried
}

func (p *livePod) add(c *Container) { p.containers = append(slices.Clone(p.containers), c) }

func (p *livePod) drop(c *Container) {
	p.containers = slices.DeleteFunc(slices.Clone(p.containers), func(other *Container) bool { return other == c })
}

// now is the pod at this moment.
func (s *Sandbox) now() livePod { return s.live.Now() }

// change changes the pod in one step; f must not block.
func (s *Sandbox) change(f func(*livePod)) { s.live.Change(f) }

// record is what is on record of the pod, or will be.
func (s *Sandbox) record() records.Pod {
	return records.Pod{PodPlan: s.plan, PodState: s.now().PodState}
}

func (s *Sandbox) put(ctx context.Context) error {
	return s.engine.records.Pods.Put(ctx, s.id, new(s.record()))
}

// takeInfra is false if the pod does not need the task any more.
func (s *Sandbox) takeInfra(t oci.Task) (taken bool) {
	s.change(func(now *livePod) {
		if taken = s.ending.Err() == nil; taken {
			now.infra, now.unreachable = t, false
		}
	})
	return taken
}

// publish shows readers the pod as it is now.
func (s *Sandbox) publish() {
	s.change(func(now *livePod) {
		v := &view.Sandbox{
			ID:        s.id,
			Handler:   s.plan.Handler,
			Config:    records.Pod{PodPlan: s.plan, PodState: now.PodState}.Current(),
			State:     cri.PodSandboxState_SANDBOX_NOTREADY,
			CreatedAt: s.plan.CreatedAt,
			Memo:      new(view.Memo),
		}
		if now.Phase == records.Ready && s.ending.Err() == nil {
			v.State = cri.PodSandboxState_SANDBOX_READY
			if s.plan.Namespaces.Net {
				v.NetNS = s.plan.Namespaces.Paths().Net
			}
			if now.Network != nil {
				v.IPs = now.Network.IPs
				v.Interface = now.Network.Interface
			}
			if now.infra != nil {
				v.PID = now.infra.PID()
			}
		} else {
			s.meter.Close()
		}
		s.view.Store(v) // before anybody changes the pod again
	})
}

// liveContainer is what changes of a container.
type liveContainer struct {
	records.ContainerState
	task oci.Task // nil only while it is being created or torn down unseen
	// unreachable: task is what there is until the monitor, which an earlier server
	// has started, answers.
	unreachable bool
	exit        *conmon.Exit
	gone        bool // removed
}

// now is the container at this moment.
func (c *Container) now() liveContainer { return c.live.Now() }

// change changes the container in one step; f must not block.
func (c *Container) change(f func(*liveContainer)) { c.live.Change(f) }

func (c *Container) put(ctx context.Context) error {
	return c.engine.records.Containers.Put(ctx, c.id, &records.Container{ContainerPlan: c.plan, ContainerState: c.now().ContainerState})
}

// setTask is false for a container that is being removed, which has no use for it.
func (c *Container) setTask(task oci.Task, unreachable bool) (taken bool) {
	c.change(func(now *liveContainer) {
		if taken = now.Phase != records.Removing; taken {
			now.task, now.unreachable = task, unreachable
		}
	})
	return taken
}

// publish shows readers the container as it is now.
func (c *Container) publish() {
	c.change(func(now *liveContainer) { c.view.Store(c.viewOf(now)) }) // before anybody changes it again
}

func (c *Container) viewOf(now *liveContainer) *view.Container {
	v := &view.Container{
		ID:         c.id,
		SandboxID:  c.plan.SandboxID,
		Handler:    c.plan.Handler,
		Config:     c.plan.Config.M,
		ImageID:    c.plan.ImageID,
		ImageRef:   c.plan.ImageRef,
		State:      cri.ContainerState_CONTAINER_CREATED,
		CreatedAt:  c.plan.CreatedAt,
		StartedAt:  now.StartedAt,
		LogPath:    c.plan.LogPath,
		Mounts:     c.plan.Mounts(),
		User:       now.User.M,
		StopSignal: c.plan.StopSignal,
		Bundle:     c.ref.Dir,
		Memo:       new(view.Memo),
	}
	if now.Resources.M != nil {
		v.Resources = &cri.ContainerResources{Linux: now.Resources.M}
	}
	switch {
	case now.exit != nil:
		v.State = cri.ContainerState_CONTAINER_EXITED
		v.FinishedAt = now.exit.FinishedAt
		v.ExitCode, v.Reason, v.Message = now.Ending(*now.exit)
	case now.Phase == records.Started:
		v.State = cri.ContainerState_CONTAINER_RUNNING
		v.PID = now.task.PID()
	default:
		v.PID = now.task.PID()
		if now.Phase == records.Starting { // of an earlier server, and may be still
			v.StartedAt = time.Time{}
		}
	}
	return v
}

// watch waits for the end of the container and makes it known.
func (c *Container) watch() { c.engine.background.Insist("watch container "+c.id, c.awaitExit) }

func (c *Container) awaitExit() {
	select {
	case <-c.exited:
		return
	default:
	}
	select {
	case <-c.now().task.Exited():
	case <-c.engine.background.Closing().Done():
		return
	}
	exit, err := c.now().task.Exit()
	switch {
	case err != nil:
		exit = c.lost(err)
	case oci.NeverStarted(c.now().task):
		c.recordExit(context.WithoutCancel(c.engine.background.Closing()), exit)
	}
	c.endLeftovers(&exit)
	if exit.OOMKills > 0 && exit.Code != 0 {
		c.engine.counters.oomKilled.Add(1)
	}
	if !c.stop.Asked() {
		c.keep()
	}
	c.showExit(exit)
	c.tell() // before whoever waits for this goes on, and ends or removes the pod
	close(c.exited)
	defer c.shorten() // last: plugins are told of all that it had
	defer c.nri.Stopped(c.engine.background.Closing())
	slog.Info("container exited", "container", c.id, "pod", c.sandbox.id, "code", exit.Code, "oomkills", exit.OOMKills)
}

// keep has the records on the disk before anybody hears of an end that nobody
// asked for: a job that has succeeded must not be run again because a power cut
// took all that tells of it. Only what lived for a moment is not there by then.
func (c *Container) keep() {
	err := errors.Join(c.engine.records.Pods.SyncOne(c.sandbox.id), c.engine.records.Containers.SyncOne(c.id))
	if err != nil {
		slog.Warn("cannot sync the records of an exited container", "container", c.id, "err", err)
	}
}

// setExit is for a container that has exited before this server began.
func (c *Container) setExit(exit conmon.Exit) {
	c.showExit(exit)
	close(c.exited)
	c.engine.background.Go("shorten bundle "+c.id, c.shorten) // of an earlier release it may be long
}

// showExit is for readers.
func (c *Container) showExit(exit conmon.Exit) {
	c.restoreCPUs() // before the next container gets its CPUs
	c.change(func(now *liveContainer) { now.exit = &exit })
	c.publish()
	c.meter.Close()
}

// Codes of exits that nobody saw.
const (
	codeKilled  = 137 // we killed it
	codeUnknown = 255 // it was gone when we came
)

// lost settles the end of a container whose monitor is gone: without it the
// container's output goes nowhere and its exit cannot be seen, so it is killed
// and this once the server writes the exit.
func (c *Container) lost(cause error) conmon.Exit {
	ctx, cancel := undoContext(c.engine.background.Closing())
	defer cancel()
	if exit, err := conmon.ReadExit(c.ref.ExitFile); err == nil { // which could not be read a moment ago
		return exit
	}
	exit := conmon.Exit{Code: codeKilled, FinishedAt: time.Now(), Message: fmt.Sprintf("killed because the container's monitor was lost (%v)", cause)}
	c.engine.counters.monitorsLost.Add(1)
	slog.ErrorContext(ctx, "monitor lost, killing its container", "container", c.id, "err", cause)
	_ = c.engine.deps.Trace.Do(ctx, "end lost container", c.id, func(ctx context.Context) error {
		if err := trace.Do(ctx, "send SIGKILL", c.now().task.Kill); err != nil {
			slog.ErrorContext(ctx, "container whose monitor was lost not dead after SIGKILL", "container", c.id, "err", err)
		}
		c.recordExit(ctx, exit)
		return nil
	})
	return exit
}

// recordExit writes the exit file of a container without a monitor, for the next server. It
// never replaces an exit. On a full disk it tries again, for as long as the container is there;
// this server knows the exit meanwhile.
func (c *Container) recordExit(ctx context.Context, exit conmon.Exit) {
	record := func() error {
		_, err := conmon.ReadExit(c.ref.ExitFile)
		if err == nil || fault.Scarce(err) {
			return err
		}
		return conmon.WriteExit(c.ref.ExitFile, exit)
	}
	err := trace.Call(ctx, "write exit file", record)
	if err == nil {
		return
	}
	slog.ErrorContext(ctx, "container exit not recorded, retrying", "container", c.id, "err", err)
	c.engine.cleanups.Add("exit of "+c.id, func(context.Context) error {
		if c.now().Phase == records.Removing {
			return nil
		}
		return record()
	})
}
