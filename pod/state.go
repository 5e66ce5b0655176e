package pod

import (
	"context"
	"log/slog"
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/object"
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

// podObject is what a pod has in common with a container.
type podObject = object.Object[livePod, records.Pod, view.Sandbox]

func (s *Sandbox) kind() object.Kind[livePod, records.Pod, view.Sandbox] {
	return object.Kind[livePod, records.Pod, view.Sandbox]{
		Records: s.engine.records.Pods,
		Record:  func(now *livePod) *records.Pod { return &records.Pod{PodPlan: s.plan, PodState: now.PodState} },
		Show:    s.show,
		Stage:   s.stage,
		Emit:    func(kind cri.ContainerEventType) { s.emit(s.ID, kind) },
		Unrecorded: func(ctx context.Context, err error) {
			slog.WarnContext(ctx, "pod removal not recorded, continuing", "pod", s.ID, "err", err)
		},
	}
}

// record is what is on record of the pod, or will be.
func (s *Sandbox) record() records.Pod {
	return records.Pod{PodPlan: s.plan, PodState: s.Now().PodState}
}

// takeInfra is false if the pod does not need the task any more.
func (s *Sandbox) takeInfra(t oci.Task) (taken bool) {
	s.Change(func(now *livePod) {
		if taken = s.ending.Err() == nil; taken {
			now.infra, now.unreachable = t, false
		}
	})
	return taken
}

// show returns the pod as readers see it. The meter of a pod that is not ready any more is
// closed with that.
func (s *Sandbox) show(now *livePod) *view.Sandbox {
	v := &view.Sandbox{
		ID:        s.ID,
		Handler:   s.plan.Handler,
		Config:    records.Pod{PodPlan: s.plan, PodState: now.PodState}.Current(),
		State:     cri.PodSandboxState_SANDBOX_NOTREADY,
		CreatedAt: s.plan.CreatedAt,
		Memo:      new(view.Memo),
	}
	if now.Phase != records.Ready || s.ending.Err() != nil {
		s.meter.Close()
		return v
	}
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
	return v
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

// containerObject is what a container has in common with a pod.
type containerObject = object.Object[liveContainer, records.Container, view.Container]

func (c *Container) kind() object.Kind[liveContainer, records.Container, view.Container] {
	return object.Kind[liveContainer, records.Container, view.Container]{
		Records: c.engine.records.Containers,
		Record: func(now *liveContainer) *records.Container {
			return &records.Container{ContainerPlan: c.plan, ContainerState: now.ContainerState}
		},
		Show:  c.show,
		Stage: c.stage,
		Emit:  func(kind cri.ContainerEventType) { c.sandbox.emit(c.ID, kind) },
		Unrecorded: func(ctx context.Context, err error) {
			slog.WarnContext(ctx, "container removal not recorded, continuing", "container", c.ID, "err", err)
		},
	}
}

// setTask is false for a container that is being removed, which has no use for it.
func (c *Container) setTask(task oci.Task, unreachable bool) (taken bool) {
	c.Change(func(now *liveContainer) {
		if taken = now.Phase != records.Removing; taken {
			now.task, now.unreachable = task, unreachable
		}
	})
	return taken
}

// show returns the container as readers see it.
func (c *Container) show(now *liveContainer) *view.Container {
	v := &view.Container{
		ID:         c.ID,
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
