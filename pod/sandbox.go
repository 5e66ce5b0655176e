package pod

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/object"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/rundir"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
)

// Sandbox is a pod.
type Sandbox struct {
	podObject

	engine  *Engine
	plan    records.PodPlan
	files   files.Pod
	runtime oci.Runtime
	meters  *cgroup.Meters // of its containers
	meter   *usage.Meter   // nil: usage is that of the containers
	cgroup  string         // the pod's own, or that of its infra container
	// clamped: the runtime sandbox may have less than an update has given to the pod.
	clamped atomic.Bool

	room     rundir.Room
	remaking sync.Mutex    // held while files that are gone are made again
	nri      nri.PodEvents // guarded by Life

	// ending ends, within a Change, when the pod does: from then on no container is created,
	// and creations under way are cancelled.
	ending   context.Context
	callOff  context.CancelCauseFunc
	creating sync.WaitGroup // of containers
}

// runtimeOf returns the runtime of a pod that was made with the handler of that name; origin is
// what is on record of it.
func (e *Engine) runtimeOf(handler string, origin *oci.Origin) (oci.Runtime, error) {
	if origin == nil {
		return e.deps.Runtimes.Get(handler)
	}
	return e.deps.Runtimes.Bind(handler, *origin)
}

func (e *Engine) newSandbox(id string, rec records.Pod) (*Sandbox, error) {
	runtime, err := e.runtimeOf(rec.Handler, rec.Origin)
	if err != nil {
		return nil, err
	}
	meters := e.meters.OfPod()
	var own string
	var m *usage.Meter
	if _, infra, err := e.planner().Cgroup(rec.Config.M, rec.CgroupPrefix, id); err == nil {
		own, m = usage.NewPodMeter(meters, rec.Config.M, infra, rec.Infra, rec.Sandboxed)
	}
	s := &Sandbox{
		engine:  e,
		files:   e.cfg.filesOf(id, &rec.PodPlan),
		runtime: runtime,
		meters:  meters,
		meter:   m,
		cgroup:  own,
		plan:    rec.PodPlan,
	}
	s.ID, s.Kind = id, s.kind()
	e.names.notePod(id, &s.plan)
	s.Change(func(now *livePod) { now.PodState, now.created = rec.PodState, rec.CreatedAt })
	s.nri = nri.PodEvents{Plugins: e.deps.Plugins, Describe: s.describe}
	s.ending, s.callOff = context.WithCancelCause(context.WithoutCancel(e.background.Closing()))
	s.clamped.Store(rec.Overhead.M != nil || rec.Resources.M != nil) // an earlier server may have clamped it
	return s, nil
}

// livePod is the state of a pod: what changes of it.
type livePod struct {
	records.PodState
	infra       oci.Task     // nil: there is none, or it is not started yet
	unreachable bool         // the monitor of infra has not answered since the server was started
	containers  []*Container // replaced, never modified
	gone        bool         // removed
	created     time.Time    // as readers see it; see clock.go
	detachErr   error        // why the last release of the network failed
}

func (p *livePod) add(c *Container) { p.containers = append(slices.Clone(p.containers), c) }

func (p *livePod) drop(c *Container) {
	p.containers = slices.DeleteFunc(slices.Clone(p.containers), func(other *Container) bool { return other == c })
}

// podObject is the part of a pod that works like that of a container.
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

// record returns what is on record of the pod, or will be with the next Put.
func (s *Sandbox) record() records.Pod {
	return records.Pod{PodPlan: s.plan, PodState: s.Now().PodState}
}

// takeInfra sets the infra container's task, and reports whether it did: a pod that ends has no
// use for it.
func (s *Sandbox) takeInfra(t oci.Task) (taken bool) {
	s.Change(func(now *livePod) {
		if taken = s.ending.Err() == nil; taken {
			now.infra, now.unreachable = t, false
		}
	})
	return taken
}

// show returns the pod as readers see it. It also closes the meter of a pod that is no longer
// ready.
func (s *Sandbox) show(now *livePod) *view.Sandbox {
	v := &view.Sandbox{
		ID:        s.ID,
		Handler:   s.plan.Handler,
		Config:    records.Pod{PodPlan: s.plan, PodState: now.PodState}.Current(),
		State:     cri.PodSandboxState_SANDBOX_NOTREADY,
		CreatedAt: now.created,
		Memo:      new(view.Memo),
	}
	if !s.plan.ByDefault {
		v.Asked = s.plan.Handler
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

// stage returns how far the pod has come: it runs, is stopped or is gone, and knows no other
// stages.
func (s *Sandbox) stage() (now, skip view.Stage) {
	switch at := s.Now(); {
	case at.gone:
		return view.Deleted, view.Unknown
	case s.ending.Err() != nil || at.Phase != records.Ready:
		return view.Stopped, view.Unknown
	}
	return view.Started, view.Unknown
}
