package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/files"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/rundir"
	"github.com/crius-run/crius/pod/usage"
)

// Sandbox is a pod.
type Sandbox struct {
	podObject

	engine  *Engine
	plan    records.PodPlan
	files   files.Pod
	runtime oci.Runtime
	meters  *cgroup.Meters // of its containers
	meter   *usage.Meter   // nil: only the containers use anything
	cgroup  string         // the pod's own, or the one of its infra container
	// clamped: the sandbox may not have got all that an update has given to the pod.
	clamped atomic.Bool

	room rundir.Room
	nri  nri.PodEvents // guarded by Life

	// ending ends, within a change, when the pod does: no container is created from
	// then on, and the creations under way are called off.
	ending   context.Context
	callOff  context.CancelCauseFunc
	creating sync.WaitGroup // of containers
}

func (e *Engine) newSandbox(id string, rec records.Pod) (*Sandbox, error) {
	runtime, err := e.deps.Runtimes.Get(rec.Handler)
	if err != nil {
		return nil, err
	}
	meters := e.meters.OfPod()
	var own string
	var m *usage.Meter
	if _, infra, err := e.planner.Cgroup(rec.Config.M, rec.CgroupPrefix, id); err == nil {
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
	s.Change(func(now *livePod) { now.PodState = rec.PodState })
	s.nri = nri.PodEvents{Plugins: e.deps.Plugins, Describe: s.describe}
	s.ending, s.callOff = context.WithCancelCause(context.WithoutCancel(e.background.Closing()))
	s.clamped.Store(rec.Overhead.M != nil || rec.Resources.M != nil) // as far as the next server knows
	return s, nil
}

// RunSandbox runs a pod and returns its id. Asked again with the same request
// it joins the work, or returns the pod that is running already; the same name
// with another request is fault.Exists.
func (e *Engine) RunSandbox(ctx context.Context, handler string, cfg *cri.PodSandboxConfig) (string, error) {
	if handler == "" {
		handler = e.deps.Runtimes.Default()
	}
	abilities, err := e.status.Probe(ctx, handler)
	if err != nil {
		return "", err
	}
	if err := e.validatePod(cfg); err != nil {
		return "", err
	}
	if e.planner.Namespaces("", cfg).UIDs != nil {
		if err := e.status.CanMap(handler, abilities); err != nil {
			return "", err
		}
	}
	name := records.NameOfPod(cfg.GetMetadata())
	key, err := requestOf(name, cfg, &cri.RuntimeHandler{Name: handler})
	if err != nil {
		return "", err
	}
	return e.creates.Do(ctx, key, func(ctx context.Context) (string, error) {
		id := ids.New(e.mark)
		if owner, ok := e.sandboxes.Reserve(name, id); !ok {
			s, err := e.sandboxes.Find(owner) // whose work is done, if this is a retry
			if err == nil && s.View().State == cri.PodSandboxState_SANDBOX_READY &&
				s.plan.Handler == handler && proto.Equal(s.plan.Config.M, cfg) { // as it was asked for, whatever updates have changed
				return owner, nil
			}
			return "", fmt.Errorf("pod %s already exists as %s; remove it or raise metadata.attempt: %w", name, owner, fault.Exists)
		}
		started := time.Now()
		err := e.deps.Trace.Do(ctx, "run pod", name.String(), func(ctx context.Context) error {
			return e.runSandbox(ctx, id, e.planner.Pod(id, blueprint.PodRequest{
				Handler: handler, Config: cfg, Sandboxed: abilities.Sandboxed, At: time.Now(),
			}))
		})
		if err != nil {
			e.sandboxes.Drop(name, id)
			return "", fmt.Errorf("pod %s: %w", name, err)
		}
		slog.InfoContext(ctx, "pod started", "pod", id, "name", name.String(), "handler", handler, "took", time.Since(started))
		return id, nil
	})
}

// validatePod refuses what can never work before anything is made.
func (e *Engine) validatePod(cfg *cri.PodSandboxConfig) error {
	if err := blueprint.CheckPod(cfg); err != nil {
		return err
	}
	if _, err := files.ResolvConf(cfg.GetDnsConfig()); err != nil {
		return err
	}
	_, _, err := e.planner.Cgroup(cfg, "", "0")
	return err
}

func (e *Engine) runSandbox(ctx context.Context, id string, plan records.PodPlan) error {
	level, err := e.labels.Allot(id, plan.Config.M)
	if err != nil {
		return err
	}
	plan.SELinuxLevel = level
	s, err := e.newSandbox(id, records.Pod{PodPlan: plan, PodState: records.PodState{Phase: records.Creating}})
	if err == nil {
		err = s.admitAsked(ctx)
	}
	if err == nil && plan.Namespaces.Net {
		err = s.planNetwork()
	}
	if err != nil {
		e.labels.Levels.Free(id)
		return err
	}
	if err = s.Put(ctx); err == nil {
		err = panics.Do(ctx, "build pod", func() error { return s.build(ctx) })
	}
	if err != nil {
		ctx, cancel := undoContext(ctx)
		defer cancel()
		s.nri.Undone(ctx)
		if undo := s.teardown(ctx); undo != nil {
			slog.WarnContext(ctx, "cleanup after failed pod creation incomplete, retrying", "pod", id, "err", undo)
			e.cleanups.Add(id, s.teardown)
		}
		return err
	}
	s.Publish()
	e.sandboxes.Publish(id, s)
	s.nri.Shown()
	s.Tell()
	return nil
}

// admitAsked refuses annotations that cannot be followed, and tells of those that will
// not be.
func (s *Sandbox) admitAsked(ctx context.Context) error {
	asked, err := s.asked()
	if err == nil && len(asked.Ignored) > 0 {
		slog.WarnContext(ctx, "annotations have no effect: allowed_annotations of the handler does not name them, or crius does not support them",
			"pod", s.ID, "handler", s.plan.Handler, "annotations", asked.Ignored)
	}
	return err
}

// build makes everything a pod consists of. What it made before an error is
// left to teardown.
func (s *Sandbox) build(ctx context.Context) error {
	var record errgroup.Group            // on its way to the disk
	defer func() { _ = record.Wait() }() // attach has returned its error
	if s.plan.Namespaces.Net {
		record.Go(func() error {
			return trace.Call(ctx, "sync record", func() error { return s.Sync() })
		})
	}
	for _, step := range []struct {
		name   string
		needed bool
		do     func(context.Context) error
	}{
		{"make pod directory", true, func(context.Context) error { return s.files.MakeDir() }},
		{"mount pod files", true, s.labelled(s.files.Mount)},
		{"write pod files", true, func(context.Context) error { return s.files.Write(&s.plan) }},
		{"mount shm", s.plan.Namespaces.IPC, s.labelled(s.mountShm)},
		{"make namespaces", true, func(context.Context) error { return makeNamespaces(s.plan.Namespaces) }},
		{"attach network", s.plan.Namespaces.Net, func(ctx context.Context) error { return s.attach(ctx, record.Wait) }},
		{"start infra container", s.plan.Infra, s.startInfra},
		{"make cgroup", s.plan.NeedsNetworkCgroup(), func(context.Context) error { return cgroup.Make(s.infraRef().Cgroup) }},
		{"call NRI plugins", true, s.nri.Run},
	} {
		if !step.needed {
			continue
		}
		if err := trace.Do(ctx, step.name, step.do); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	s.Change(func(now *livePod) { now.Phase = records.Ready })
	return s.Put(ctx)
}

// labelled calls a step that makes files with their SELinux context.
func (s *Sandbox) labelled(step func(label string) error) func(context.Context) error {
	return func(context.Context) error {
		label, err := s.engine.labels.Files(&s.plan, nil)
		if err != nil {
			return err
		}
		return step(label)
	}
}

// mountShm makes the /dev/shm of the pod's IPC namespace; the node's own goes
// with the node's namespace.
func (s *Sandbox) mountShm(label string) error {
	asked, err := s.asked()
	if err != nil {
		return err
	}
	return s.files.MountShm(cmp.Or(asked.ShmSize, s.engine.cfg.ShmSize), label)
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

// RemoveSandbox stops the pod, and removes its containers and its record. It is
// idempotent, and unknown ids are no error.
func (e *Engine) RemoveSandbox(ctx context.Context, id string) error {
	return e.onPod(ctx, "remove pod", id, (*Sandbox).remove)
}

func (s *Sandbox) remove(ctx context.Context) error {
	if s.Now().Phase == records.Removing {
		return nil // by a call that was here before us
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
	s.Change(func(now *livePod) { now.Phase = records.Removing }) // before: a plugin that connects now is not told of this
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

// end refuses new containers, calls off those being created and waits until
// they are gone.
func (s *Sandbox) end() {
	s.Change(func(*livePod) { s.callOff(errPodEnding) })
	s.creating.Wait()
}

var errPodEnding = fmt.Errorf("the pod is being stopped: %w", fault.Precondition)

// admit ties the creation of a container to the pod's life. The caller calls
// done when the container is a member or gone.
func (s *Sandbox) admit(ctx context.Context) (_ context.Context, done func(), _ error) {
	admitted := false
	s.Change(func(now *livePod) {
		if admitted = s.ending.Err() == nil && now.Phase == records.Ready; admitted {
			s.creating.Add(1)
		}
	})
	if !admitted {
		return nil, nil, fmt.Errorf("pod %s is not ready: %w", s.ID, fault.Precondition)
	}
	ctx, cancel := until(ctx, s.ending)
	return ctx, func() {
		cancel()
		s.creating.Done()
	}, nil
}

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

// makeNamespaces makes and pins the namespaces that the containers share. No
// process is needed to hold them.
func makeNamespaces(n ns.Spec) error {
	if !n.Net && !n.IPC && !n.UTS && len(n.UIDs) == 0 {
		return nil
	}
	_, err := ns.Create(n)
	return err
}
