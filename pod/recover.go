package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/internal/retry"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// recoverWidth bounds how many objects are recovered concurrently.
const recoverWidth = 16

// recoverTime is how long the start waits for monitors, and then again for teardown.
const recoverTime = 5 * time.Second

// Recover restores the engine after the last server ended, however it did: it reads the
// records, finds the containers that still run, records the exits since then, tears
// down what was not ready and removes orphans. It is idempotent and may be killed at
// any point. No verb may be called before it returns. A cleanup that fails is retried
// and does not keep the server from starting.
//
// A node serves within seconds, and within a bound even if something hangs. Apart from its
// own files, the start of a server waits only for:
//
//	lock of containers/storage that another process holds   10 s, then it fails and is started again
//	post-crash check of images after a boot                 as long as it reads, which the service manager is notified of
//	versions and features of runtimes                       10 s each, concurrently
//	paths of pod.additional_devices                         5 s, then it fails
//	AppArmor's parser                                       30 s, once after a boot
//	lock of containers/storage, for the images in use       10 s
//	host ports: the firewall's tool                         30 s, then it is retried in the background
//	runtimes that are still starting commands               2 s, containers concurrently
//	monitors' answers, teardown of unfinished containers    recoverTime, together; see reconnect
//	runtimes that are asked which containers they have       recoverTime, together
//	teardown of pods and of orphans                         recoverTime, together
//
// Teardown that takes longer continues in the background. Between two checks of a lock,
// containers/storage itself may wait for it, without a limit.
func (e *Engine) Recover(ctx context.Context) error {
	return e.deps.Trace.Do(ctx, "recover", "node", (&recovery{engine: e}).run)
}

func (r *recovery) run(ctx context.Context) error {
	started, e := time.Now(), r.engine
	if err := e.makeDirs(); err != nil {
		return err
	}
	if err := e.classes.Load(ctx); err != nil {
		return err
	}
	if err := e.labels.CopyProgram(); err != nil { // a full disk must not keep the server from starting
		slog.ErrorContext(ctx, "cannot copy the pause program, pods with shareProcessNamespace may fail", "err", err)
	}
	pods, orphanPods, damagedPods, err := e.records.Pods.All()
	if err != nil {
		return fmt.Errorf("read pod records: %w", err)
	}
	ctrs, orphanCtrs, damagedCtrs, err := e.records.Containers.All()
	if err != nil {
		return fmt.Errorf("read container records: %w", err)
	}
	reportDamaged(ctx, "pod", damagedPods)
	reportDamaged(ctx, "container", damagedCtrs)

	r.adopt(ctx, ctrs)
	r.restoreTuning(ctx, ctrs)
	r.restoreNetwork(ctx, pods)
	r.recorded = ctrs
	r.loadSandboxes(ctx, pods)
	r.recoverContainers(ctx, ctrs)
	r.recoverSandboxes(ctx)
	e.orderAttempts()
	e.followCPUs(ctx)
	if silent := e.Summary().Unreachable; silent > 0 {
		slog.ErrorContext(ctx, "monitors do not answer, their containers keep their last known state; see crius check", "monitors", silent)
	}
	known := func(id string) bool { return pods[id] != nil || ctrs[id] != nil }
	r.sweepWithoutRecord(ctx, slices.Concat(orphanPods, orphanCtrs), known)
	slog.InfoContext(ctx, "recovered", "pods", len(e.sandboxes.All()), "containers", len(e.containers.All()), "took", time.Since(started))
	return nil
}

// recovery is one run of Recover.
type recovery struct {
	engine    *Engine
	recorded  map[string]*records.Container
	sandboxes map[string]*Sandbox    // those whose runtimes are known
	origins   map[string]*oci.Origin // of the handlers as they are configured; nil: not known
	answers   waiting                // of monitors, and for the teardown of unfinished containers
	ends      waiting                // of pods and of orphans
}

func reportDamaged(ctx context.Context, noun string, damaged []record.Damaged) {
	for _, d := range damaged {
		slog.ErrorContext(ctx, "unreadable record moved aside; removing the pod or container it describes", "kind", noun, "id", d.ID, "file", d.File, "err", d.Err)
	}
}

func (r *recovery) loadSandboxes(ctx context.Context, pods map[string]*records.Pod) {
	r.sandboxes, r.origins = make(map[string]*Sandbox, len(pods)), make(map[string]*oci.Origin)
	for id, rec := range pods {
		r.engine.labels.Levels.Note(id, rec.SELinuxLevel)
		s, err := r.engine.newSandbox(id, *rec)
		if err != nil {
			// Its runtime is not on record and no longer configured. The pod cannot be managed until
			// that is back, and stays as it is, with its records.
			slog.ErrorContext(ctx, "pod is not managed, its runtime handler cannot be used: correct that and restart crius", "pod", id, "handler", rec.Handler, "err", err)
			continue
		}
		if rec.Origin == nil {
			r.noteOrigin(ctx, s)
		}
		r.sandboxes[id] = s
	}
}

// recoverContainers recovers all containers, and waits for their states for a limited time.
func (r *recovery) recoverContainers(ctx context.Context, ctrs map[string]*records.Container) {
	for _, s := range r.sandboxes {
		r.loadInfra(s)
	}
	var g errgroup.Group
	g.SetLimit(recoverWidth)
	for id, rec := range ctrs {
		g.Go(func() error {
			panics.Run(ctx, "recover container "+id, func() { r.recoverContainer(ctx, id, *rec) })
			return nil
		})
	}
	_ = g.Wait()
	r.endLeftovers(ctx)
	r.answers.await(ctx, r.engine.recoverTime)
}

// recoverSandboxes recovers all pods. The containers have been recovered before.
func (r *recovery) recoverSandboxes(ctx context.Context) {
	var g errgroup.Group
	g.SetLimit(recoverWidth)
	for _, s := range r.sandboxes {
		g.Go(func() error {
			panics.Run(ctx, "recover pod "+s.ID, func() { r.recoverSandbox(ctx, s) })
			return nil
		})
	}
	_ = g.Wait()
}

// restoreNetwork sets up the host ports of the pods that were ready when the last server ended.
// Pods that have died since are detached later, like any others.
func (r *recovery) restoreNetwork(ctx context.Context, pods map[string]*records.Pod) {
	if err := r.engine.deps.Network.Restore(ctx, records.Attached(pods, r.engine.planner().Boot)); err != nil {
		slog.ErrorContext(ctx, "host ports may not be forwarded to their pods, retrying", "err", err)
	}
}

// adopt restores the image references of all containers on record, even of those that will be
// removed: their teardown releases them.
func (r *recovery) adopt(ctx context.Context, ctrs map[string]*records.Container) {
	var rootfs []storage.Rootfs
	for id, rec := range ctrs {
		rootfs = append(rootfs, rec.ImagesInUse(id)...)
	}
	adopt := func(ctx context.Context) error { return r.engine.deps.Images.Adopt(ctx, rootfs) }
	if err := trace.Do(ctx, "restore image references", adopt); err != nil {
		// The containers continue to run; the kubelet will pull the images again.
		slog.ErrorContext(ctx, "cannot keep all images that containers use", "err", err)
	}
}

// end starts cleanup now, and retries it until it succeeds.
func (r *recovery) end(id string, cleanup retry.Work, ends *waiting) {
	ends.add(r.engine.cleanups.AddNow(id, cleanup))
}

// recoverSandbox restores the pod, or tears it down if its creation or removal was interrupted.
func (r *recovery) recoverSandbox(ctx context.Context, s *Sandbox) {
	e, now := r.engine, s.Now()
	switch {
	case now.Phase == records.Creating, now.Phase == records.Removing, now.Restoring:
		s.end()
		slog.WarnContext(ctx, "unfinished pod, removing it", "pod", s.ID)
		r.end(s.ID, s.dismantle, &r.ends)
		return
	case now.Phase == records.Stopping:
		s.end()
		r.end(s.ID, s.expire, &r.ends)
	case now.Phase == records.Ready:
		lost, unseen := audit.Lost(s.record(), now.infra, e.planner().Boot)
		for _, why := range unseen {
			slog.WarnContext(ctx, "cannot check part of a pod", "pod", s.ID, "err", why)
		}
		if len(lost) > 0 {
			slog.WarnContext(ctx, "pod has lost a namespace or process it needs, stopping it", "pod", s.ID, "err", errors.Join(lost...))
			s.end()
			r.end(s.ID, s.expire, &r.ends)
		}
	case now.Phase == records.Stopped:
		if s.Now().HasNetwork() {
			e.cleanups.Add(s.ID, s.finishStop)
		}
	}
	e.sandboxes.Reserve(records.NameOfPod(s.plan.Config.M.GetMetadata()), s.ID)
	s.Publish()
	e.sandboxes.Publish(s.ID, s)
	s.Tell()
}

// recoverContainer restores a container, or tears it down if its creation or removal was
// interrupted or its pod is gone.
func (r *recovery) recoverContainer(ctx context.Context, id string, rec records.Container) {
	e, s := r.engine, r.sandboxes[rec.SandboxID]
	if s == nil {
		runtime, err := e.runtimeOf(rec.Handler, rec.Origin)
		if err != nil {
			return // like its pod, it waits for the handler
		}
		slog.WarnContext(ctx, "container without a pod, removing it", "container", id, "pod", rec.SandboxID)
		s = &Sandbox{podObject: podObject{ID: rec.SandboxID}, engine: e, runtime: runtime, meters: e.meters, files: e.cfg.filesOf(rec.SandboxID, &records.PodPlan{})}
		r.end(id, e.newContainer(id, s, rec).teardown, &r.answers)
		return
	}
	c := e.newContainer(id, s, rec)
	if rec.Phase == records.Creating || rec.Phase == records.Removing {
		s.room.Keep(id, c.use())
		r.end(id, c.teardown, &r.answers)
		return
	}
	if exit, err := conmon.ReadExit(c.ref.ExitFile); err == nil {
		c.setTask(oci.Dead(exit), false) // its monitor may still wait for the end of its output
		if c.Now().Phase == records.Starting {
			c.settleAs(records.Started)
			e.cleanups.AddNow(id, c.recordStart)
		}
		c.setExit(exit)
	} else if rec.BootID != e.planner().Boot {
		c.reloadDead(ctx, err)
	} else if refused := rec.Refused(); refused != nil {
		c.setTask(oci.Unstartable(refused, records.StartErrorCode), false)
		c.Publish()
		e.background.Go("watch container", c.watch)
	} else {
		c.setTask(c.runtime.Unreachable(c.ref), true)
		c.Publish()
		known := make(chan struct{})
		r.answers.add(known)
		e.background.Go("reconnect container "+id, func() { c.reconnect(known) })
	}
	if rec.Checkpoint != nil {
		slog.WarnContext(ctx, "unfinished checkpoint, removing it", "container", id, "path", rec.Checkpoint.Dir)
		r.end(checkpointOf(id), c.finishCheckpoint, &r.answers)
	}
	e.containers.Reserve(records.NameOfContainer(s.ID, rec.Config.M.GetMetadata()), id)
	s.Change(func(now *livePod) { now.add(c) })
	e.containers.Publish(id, c)
	c.Tell()
}

// sweepWithoutRecord removes everything of pods and containers that have no record: directories, and
// what runtimes have left, such as virtual machines. Handlers that could remove it may have been taken
// out of the configuration.
func (r *recovery) sweepWithoutRecord(ctx context.Context, orphans []string, known func(id string) bool) {
	for _, kind := range []string{"pods", "containers"} {
		entries, _ := os.ReadDir(filepath.Join(r.engine.cfg.RunDir, kind))
		for _, entry := range entries {
			orphans = append(orphans, entry.Name())
		}
	}
	orphans = slices.DeleteFunc(orphans, known)
	asking, cancel := context.WithTimeout(ctx, r.engine.recoverTime)
	defer cancel()
	left, err := r.engine.audit.Left(asking, orphans)
	if err != nil {
		slog.WarnContext(ctx, "cannot look for everything that has no record; see crius check", "err", err)
	}
	maps.DeleteFunc(left, func(id string, _ func(context.Context) error) bool { return known(id) }) // its teardown has ended just now
	for _, id := range slices.Sorted(maps.Keys(left)) {
		r.engine.counters.leftovers.Add(1)
		slog.WarnContext(ctx, "removing orphan: it has no record", "id", id)
		r.end(id, left[id], &r.ends)
	}
	if left := r.ends.await(ctx, r.engine.recoverTime); left > 0 {
		slog.WarnContext(ctx, "cleanup continues in the background", "objects", left)
	}
}

// endLeftovers kills what remains of all containers that had exited before this server started.
func (r *recovery) endLeftovers(ctx context.Context) {
	var cgroups []string
	exited := map[string]*Container{}
	for _, c := range r.engine.containers.All() {
		if c.Now().exit == nil {
			continue
		}
		if s := c.sandbox; c.mayLeaveProcesses() && s.Now().Phase == records.Ready && s.plan.BootID == r.engine.planner().Boot {
			r.end("sandboxed processes of "+c.ID, c.killSandboxed, &r.answers)
		}
		if c.ref.Cgroup != "" {
			cgroups = append(cgroups, c.ref.Cgroup)
			exited[c.ref.Cgroup] = c
		}
	}
	left, err := cgroup.Occupied(cgroups)
	if err != nil {
		slog.WarnContext(ctx, "cannot look for processes of exited containers", "err", err)
	}
	for _, path := range left {
		c := exited[path]
		slog.WarnContext(ctx, "exited container has processes, killing them", "container", c.ID)
		r.end("processes of "+c.ID, c.killLeftovers, &r.answers)
	}
}

// restoreTuning reads what an earlier server did for the CPUs of containers, and undoes it for
// containers without a record, or with a record of a crius that cannot tune CPUs.
func (r *recovery) restoreTuning(ctx context.Context, ctrs map[string]*records.Container) {
	if err := r.recoverTuning(ctx, ctrs); err != nil {
		slog.ErrorContext(ctx, "settings of CPUs not restored, retrying; containers with CPU annotations do not start until then", "err", err)
		r.engine.cleanups.Add("CPU settings", func(ctx context.Context) error { return r.recoverTuning(ctx, ctrs) })
	}
}

func (r *recovery) recoverTuning(ctx context.Context, ctrs map[string]*records.Container) error {
	tuner := r.engine.tuner
	tuned, err := tuner.Recover(ctx)
	if err != nil {
		return err
	}
	for _, id := range tuned {
		if rec := ctrs[id]; rec == nil || !rec.Tuning.Changes() {
			r.end("CPUs of "+id, func(ctx context.Context) error { return tuner.Release(ctx, id) }, &r.ends)
		}
	}
	return nil
}
