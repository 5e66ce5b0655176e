package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/storage"
)

// recoverWidth bounds how many objects are recovered side by side.
const recoverWidth = 16

// Recover makes the engine right again after whatever ended the last one: it
// reads the records, finds the containers that still run, notes the exits that
// happened meanwhile, tears down what was not ready and sweeps what has no
// record. It is idempotent and may itself be killed at any point. No verb may
// be called before it returns. What cannot be cleaned up now becomes a debt
// and is no reason not to start.
func (e *Engine) Recover(ctx context.Context) error {
	return e.deps.Trace.Do(ctx, "recover", "node", e.recover)
}

func (e *Engine) recover(ctx context.Context) error {
	started := time.Now()
	if err := e.makeDirs(); err != nil {
		return err
	}
	pods, orphanPods, damagedPods, err := e.podRecords.All()
	if err != nil {
		return fmt.Errorf("read pod records: %w", err)
	}
	ctrs, orphanCtrs, damagedCtrs, err := e.ctrRecords.All()
	if err != nil {
		return fmt.Errorf("read container records: %w", err)
	}
	reportDamaged(ctx, "pod", damagedPods)
	reportDamaged(ctx, "container", damagedCtrs)

	e.restoreNetwork(ctx, pods)
	sandboxes := e.loadSandboxes(ctx, pods)
	var g errgroup.Group
	g.SetLimit(recoverWidth)
	var mu sync.Mutex
	var rootfs []storage.Rootfs
	for id, rec := range ctrs {
		g.Go(func() error {
			if e.recoverContainer(ctx, id, sandboxes[rec.SandboxID], *rec) {
				mu.Lock()
				rootfs = append(rootfs, rec.imagesInUse(id)...)
				mu.Unlock()
			}
			return nil
		})
	}
	_ = g.Wait()
	for _, s := range sandboxes {
		g.Go(func() error { e.recoverSandbox(ctx, s); return nil })
	}
	_ = g.Wait()
	adopt := func(ctx context.Context) error { return e.deps.Images.Adopt(ctx, rootfs) }
	if err := trace.Do(ctx, "adopt images", adopt); err != nil {
		// Their containers run on; the kubelet will pull the images again.
		slog.ErrorContext(ctx, "images of containers are missing", "err", err)
	}
	e.sweep(ctx, e.withoutRecord("containers", orphanCtrs, func(id string) bool { return ctrs[id] != nil }), e.sweepContainer)
	e.sweep(ctx, e.withoutRecord("pods", orphanPods, func(id string) bool { return pods[id] != nil }), e.sweepSandbox)
	slog.InfoContext(ctx, "recovered", "pods", len(e.sandboxes.all()), "containers", len(e.containers.all()), "took", time.Since(started))
	return nil
}

func reportDamaged(ctx context.Context, noun string, damaged []record.Damaged) {
	for _, d := range damaged {
		slog.ErrorContext(ctx, "record cannot be read: set aside, its "+noun+" is torn down", "id", d.ID, "file", d.File, "err", d.Err)
	}
}

func (e *Engine) loadSandboxes(ctx context.Context, records map[string]*podRecord) map[string]*Sandbox {
	sandboxes := make(map[string]*Sandbox, len(records))
	for id, rec := range records {
		s, err := e.newSandbox(id, *rec)
		if err != nil {
			// The handler is no longer configured. Its pods cannot be managed
			// until it is back; they are left alone, record and all.
			slog.ErrorContext(ctx, "pod of an unknown handler is left alone: configure the handler again", "pod", id, "handler", rec.Handler, "err", err)
			continue
		}
		sandboxes[id] = s
	}
	return sandboxes
}

// restoreNetwork makes the node's host ports those of the pods that were ready
// when the last server ended. Those that have died since are detached later, as
// any other.
func (e *Engine) restoreNetwork(ctx context.Context, records map[string]*podRecord) {
	if err := e.deps.Network.Restore(ctx, e.attachedPods(records)); err != nil {
		slog.ErrorContext(ctx, "host ports may not lead to their pods, will be retried", "err", err)
	}
}

// recoverSandbox puts the pod back in its place, or tears it down if it was
// not ready. Its containers have been recovered.
func (e *Engine) recoverSandbox(ctx context.Context, s *Sandbox) {
	switch s.phase() {
	case phaseCreating, phaseRemoving:
		s.ended = true
		ctx, cancel := undoContext(ctx)
		defer cancel()
		for _, c := range s.containers() {
			if err := c.remove(ctx); err != nil {
				slog.WarnContext(ctx, "container of a removed pod is still there", "container", c.id, "err", err)
			}
		}
		if err := s.teardown(ctx); err != nil {
			slog.WarnContext(ctx, "unfinished pod leaves a debt", "pod", s.id, "err", err)
			e.owe(s.id, s.teardown)
		}
		return
	case phaseStopping:
		s.expire(ctx)
	case phaseReady:
		if err := s.resume(ctx); err != nil {
			slog.WarnContext(ctx, "pod did not survive", "pod", s.id, "err", err)
			s.expire(ctx)
		}
	}
	if s.phase() == phaseStopped && s.owesNetwork() {
		e.owe(s.id, s.payStop)
	}
	e.sandboxes.reserve(nameOfPod(s.rec.Config.M.GetMetadata()), s.id)
	s.publish()
	e.sandboxes.publish(s.id, s)
	s.tell()
}

// resume checks that what a ready pod consists of is still there.
func (s *Sandbox) resume(ctx context.Context) error {
	if s.rec.BootID != s.engine.boot {
		return errors.New("the machine was booted since")
	}
	paths := s.rec.Namespaces.Paths()
	for _, path := range []string{paths.User, paths.Net, paths.IPC, paths.UTS} {
		if path == "" {
			continue
		}
		if _, err := ns.Inode(path); errors.Is(err, fault.NotFound) {
			return err
		} else if err != nil { // that it cannot be looked at is not its end
			slog.WarnContext(ctx, "namespace of a pod cannot be looked at", "pod", s.id, "err", err)
		}
	}
	if !s.rec.Infra {
		return nil
	}
	return s.resumeInfra(ctx)
}

// expire is the stop of a pod that is dead already.
func (s *Sandbox) expire(ctx context.Context) {
	ctx, cancel := undoContext(ctx)
	defer cancel()
	s.life.Lock()
	defer s.life.Unlock()
	if err := s.stop(ctx); err != nil {
		slog.ErrorContext(ctx, "dead pod cannot be cleaned up, the kubelet's StopPodSandbox will try again", "pod", s.id, "err", err)
	}
}

// recoverContainer puts a container back in its place, or tears it down if it
// was not ready or has lost its pod. It reports whether there still is one, in
// whatever state.
func (e *Engine) recoverContainer(ctx context.Context, id string, s *Sandbox, rec containerRecord) bool {
	if s == nil {
		return e.recoverStray(ctx, id, rec)
	}
	c := e.newContainer(id, s, rec)
	if rec.Phase == phaseCreating || rec.Phase == phaseRemoving {
		return !e.discard(ctx, c)
	}
	if err := c.reload(ctx); err != nil {
		slog.ErrorContext(ctx, "container cannot be recovered and is torn down", "container", id, "err", err)
		return !e.discard(ctx, c)
	}
	e.containers.reserve(nameOfContainer(s.id, rec.Config.M.GetMetadata()), id)
	s.addMember(c)
	e.containers.publish(id, c)
	c.tell()
	return true
}

// discard tears a container down, and reports whether it is gone.
func (e *Engine) discard(ctx context.Context, c *Container) (gone bool) {
	ctx, cancel := undoContext(ctx)
	defer cancel()
	if err := c.teardown(ctx); err != nil {
		slog.WarnContext(ctx, "unfinished container leaves a debt", "container", c.id, "err", err)
		e.owe(c.id, c.teardown)
		return false
	}
	return true
}

// recoverStray deals with a container whose pod has no usable record.
func (e *Engine) recoverStray(ctx context.Context, id string, rec containerRecord) bool {
	runtime, err := e.deps.Runtimes.Get(rec.Handler)
	if err != nil {
		return true // with its pod, until the handler is back
	}
	slog.WarnContext(ctx, "container without a pod is torn down", "container", id, "pod", rec.SandboxID)
	return !e.discard(ctx, e.newContainer(id, &Sandbox{engine: e, id: rec.SandboxID, runtime: runtime}, rec))
}

// reload finds out how the container is.
func (c *Container) reload(ctx context.Context) error {
	if c.rec.BootID != c.engine.boot {
		return c.reloadDead(ctx)
	}
	task, err := c.runtime.Load(ctx, c.ref)
	if err != nil {
		return err
	}
	c.task = task
	if c.rec.Phase == phaseStarting {
		c.settleStart(ctx)
	}
	c.publish()
	select {
	case <-task.Exited():
		// Readers must not see it alive for even a moment: the kubelet has
		// been told of the exit, perhaps.
		c.watch()
	default:
		c.engine.background.Go(c.watch)
	}
	return nil
}

// settleStart decides whether a start that was cut short happened.
func (c *Container) settleStart(ctx context.Context) {
	started, err := c.task.Started(ctx)
	switch {
	case err == nil && !started:
		c.setStart(phaseCreated, time.Time{})
	default:
		// The runtime answers nothing for a container that is dead: if it never
		// started, its exit by SIGKILL says so well enough.
		c.setPhase(phaseStarted)
	}
	if err := c.put(ctx); err != nil {
		slog.WarnContext(ctx, "settled start not recorded", "container", c.id, "err", err)
	}
}

// reloadDead recovers a container of another boot.
func (c *Container) reloadDead(ctx context.Context) error {
	exit, err := conmon.ReadExit(c.ref.ExitFile)
	if err != nil {
		exit = conmon.Exit{Code: codeUnknown, FinishedAt: time.Now(), Message: "the machine was booted while the container ran"}
		if !errors.Is(err, fault.NotFound) { // a disk that lies about what it keeps: no reason to forget the container
			exit.Message = "the machine was booted, and the record of the container's exit was damaged: " + err.Error()
			slog.ErrorContext(ctx, "exit of a container cannot be read and is taken for unknown", "container", c.id, "err", err)
		}
		err = trace.Call(ctx, "write exit", func() error { return conmon.WriteExit(c.ref.ExitFile, exit) })
	}
	if err != nil {
		return fmt.Errorf("exit of an earlier boot: %w", err)
	}
	c.task = oci.Dead(exit)
	c.setExit(exit)
	return nil
}

// withoutRecord lists the ids that have a run or state directory but no
// record.
func (e *Engine) withoutRecord(kind string, orphans []string, known func(id string) bool) []string {
	ids := map[string]bool{}
	for _, id := range orphans {
		ids[id] = true
	}
	entries, _ := os.ReadDir(filepath.Join(e.cfg.RunDir, kind))
	for _, entry := range entries {
		if !known(entry.Name()) {
			ids[entry.Name()] = true
		}
	}
	var list []string
	for id := range ids {
		if record.ValidID(id) {
			list = append(list, id)
		}
	}
	return list
}

func (e *Engine) sweep(ctx context.Context, ids []string, remove func(context.Context, string) error) {
	for _, id := range ids {
		e.counters.leftovers.Add(1)
		slog.WarnContext(ctx, "removing what has no record", "id", id)
		ctx, cancel := undoContext(ctx)
		if err := remove(ctx, id); err != nil {
			slog.WarnContext(ctx, "leftovers remain", "id", id, "err", err)
			e.owe(id, func(ctx context.Context) error { return remove(ctx, id) })
		}
		cancel()
	}
}
