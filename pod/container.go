package pod

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/guarded"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/object"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/stop"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// Container is a container of a pod.
type Container struct {
	containerObject // Life is not held by a stop

	engine  *Engine
	sandbox *Sandbox
	plan    records.ContainerPlan
	runtime oci.Runtime
	ref     oci.Ref
	roots   roots
	cpus    cpus
	meter   *usage.Meter
	logged  guarded.Value[conmon.LogCount] // as last counted
	warned  logWarning                     // used by watch alone

	stop *stop.Stopper
	nri  nri.ContainerEvents

	dump    atomic.Pointer[dumping] // a checkpoint under way, or its cleanup; nil: none
	freezes atomic.Uint64           // how often a checkpoint has frozen it

	exited chan struct{} // closed when the exit is known and published

	// shortening is held while the bundle is shortened, and when the removal of the container
	// begins.
	shortening sync.Mutex
}

func (e *Engine) newContainer(id string, s *Sandbox, rec records.Container) *Container {
	ref := e.containerRef(id, rec.ContainerPlan)
	if s.plan.Sandboxed {
		ref.Holder = s.ID
	}
	ref.Claim = s.claimExec
	ref.UIDs, ref.GIDs = s.plan.Namespaces.UIDs, s.plan.Namespaces.GIDs
	c := &Container{
		engine:  e,
		sandbox: s,
		plan:    rec.ContainerPlan,
		runtime: s.runtime,
		ref:     ref,
		roots: roots{
			images: e.deps.Images, volumes: rec.Volumes, bundle: ref.Dir,
			own: storage.Rootfs{
				ID: id, ImageID: rec.ImageID, Dir: e.records.Containers.Path(id), Target: ref.Rootfs(),
				MountLabel: rec.MountLabel, UserNS: s.plan.Namespaces.Paths().User, WritableSize: rec.WritableSize,
			},
		},
		cpus:   cpus{tuner: e.tuner, plan: rec.Tuning, id: id, cgroup: rec.Cgroup, parent: s.plan.Config.M.GetLinux().GetCgroupParent()},
		meter:  usage.NewMeter(s.meters, rec.Cgroup),
		exited: make(chan struct{}),
	}
	c.ID, c.Kind = id, c.kind()
	e.names.noteContainer(id, s.ID, &c.plan)
	c.Change(func(now *liveContainer) { now.ContainerState, now.created = rec.ContainerState, rec.CreatedAt })
	c.nri.Plugins, c.nri.Describe = e.deps.Plugins, c.describe
	c.stop = &stop.Stopper{
		ID: id, Ref: ref, Signal: unix.Signal(c.plan.StopNumber), Exited: c.exited, Work: e.background, Sandboxed: s.plan.Sandboxed,
		Task: func() oci.Task { return c.Now().task }, Killing: c.noteOOMKills,
		Running: func() bool { // as soon as it may, which is before anyone sees it running
			p := c.Now().Phase
			return p == records.Starting || p == records.Started
		},
	}
	return c
}

func (e *Engine) containerRef(id string, plan records.ContainerPlan) oci.Ref {
	return oci.Ref{
		ID:         id,
		Dir:        filepath.Join(e.cfg.RunDir, "containers", id),
		ExitFile:   filepath.Join(e.records.Containers.Path(id), "exit.json"),
		CgroupPath: plan.CgroupsPath,
		Cgroup:     plan.Cgroup,
	}
}

// liveContainer is the state of a container: what changes of it.
type liveContainer struct {
	records.ContainerState
	task oci.Task // nil only while it is being created or torn down unseen
	// unreachable: the monitor, which an earlier server started, has not answered yet, and task
	// stands in for it.
	unreachable bool
	log         conmon.LogTrouble // as the task reported it last
	created     time.Time         // as readers see it; see clock.go
	starting    bool              // the runtime has been asked by this server to start it, and has not answered
	abandoned   *abandonedStart   // nil: there is none
	exit        *conmon.Exit
	gone        bool // removed
}

// containerObject is the part of a container that works like that of a pod.
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

// setTask sets the task, and reports whether it did: a container that is being removed has no
// use for it.
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
		CreatedAt:  now.created,
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
		v.Message = c.plan.Explain(v.ExitCode, !now.StartedAt.IsZero(), v.Message)
	case now.Phase == records.Started:
		v.State = cri.ContainerState_CONTAINER_RUNNING
		v.PID = now.task.PID()
		v.LogReason, v.LogMessage = now.log.Reason, logMessage(now.log)
	case now.mayRun():
		v.State, v.PID = cri.ContainerState_CONTAINER_RUNNING, now.task.PID()
		if v.StartedAt.IsZero() {
			v.StartedAt = now.created
		}
		if now.abandoned != nil && now.Phase != records.Starting {
			v.StartedAt = now.abandoned.at
		}
	default:
		v.PID, v.StartedAt = now.task.PID(), time.Time{} // a start may not have happened yet
	}
	return v
}

// stage returns how far the container has come. A program that ended before it was known to run
// is reported when both are known; a container that could not be started has skipped a stage. What
// an earlier server has started is found out before it is reported.
func (c *Container) stage() (now, skip view.Stage) {
	at := c.Now()
	switch {
	case at.gone:
		now = view.Deleted
	case at.exit != nil && (at.Phase != records.Starting || at.StartError != ""):
		now = view.Stopped
	case at.Phase == records.Started, at.abandoned != nil, at.Phase == records.Starting && at.StartError != "":
		now = view.Started
	default:
		now = view.Created
	}
	if at.StartedAt.IsZero() && now != view.Started {
		skip = view.Started
	}
	return now, skip
}
