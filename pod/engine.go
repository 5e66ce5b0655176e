package pod

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/background"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/flight"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/index"
	"github.com/crius-run/crius/internal/retry"
	"github.com/crius-run/crius/oci/classes"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/tuning"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/hostpath"
	"github.com/crius-run/crius/pod/label"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/status"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// Engine is the node: all its pods and containers, and the verbs on them. Ids that its methods
// take may be unique prefixes.
type Engine struct {
	cfg     Options // at first; a reload changes those of policy
	deps    Deps
	now     atomic.Pointer[policy]
	cgroups func() error // why containers cannot have cgroups now
	paths   *hostpath.Paths
	mark    string // of the ids of this server
	status  *status.Node
	audit   *audit.Auditor
	meters  *cgroup.Meters
	labels  *label.Node
	tuner   *tuning.Tuner
	classes *classes.Classes

	records    *records.Store
	sandboxes  *index.Index[records.PodName, *Sandbox]
	containers *index.Index[records.ContainerName, *Container]
	creates    flight.Group[request, string]
	verbs      flight.Group[verb, struct{}]
	pulls      flight.Group[pullKey, *storage.Image]
	profiles   flight.Group[pullKey, bool]
	cleanups   *retry.Queue
	names      names

	seLinuxIgnored sync.Once // logs that the options of pods have no effect
	events         view.Hub
	counters       counters
	pins           pins
	userLookups    chan struct{}     // semaphore: concurrent lookups of users in images
	background     *background.Group // watchers, stops
	recoverTime    time.Duration     // the constant, unless a test sets it

	// pulling ends when the engine is closed, before background does.
	pulling  context.Context
	endPulls context.CancelCauseFunc
}

// verb identifies work on an existing object. Another call of the same verb joins it.
type verb struct{ name, id string }

// MaxRunDir is the longest run root for which the longest socket path below it,
// /pods/<id>/infra/monitor.sock, fits into the 107 bytes of a unix socket's address.
const MaxRunDir = 107 - len("/pods//infra/monitor.sock") - 64

// New opens the records under the roots of cfg; the caller holds their Lock. Nothing is changed
// before Recover. The engine outlives ctx and ends with Close.
func New(ctx context.Context, cfg Options, deps Deps) (*Engine, error) {
	if len(cfg.RunDir) > MaxRunDir {
		return nil, fmt.Errorf("run_root %s is longer than %d bytes, so unix socket paths below it would be too long: choose a shorter one: %w",
			cfg.RunDir, MaxRunDir, fault.Invalid)
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	host, err := spec.ResolveHost()
	if err != nil {
		return nil, fmt.Errorf("read host facts: %w", err)
	}
	hostPaths := &conmon.HostPaths{Monitor: cfg.PauseProgram}
	selinux, err := label.Policy(host, cfg.SELinux, !cfg.HostNetworkDisablesSELinux)
	if err != nil {
		return nil, err
	}
	first, err := cfg.policy(ctx, boot, host, selinux, hostPaths)
	if err != nil {
		return nil, err
	}
	meters, err := cgroup.NewMeters()
	if err != nil {
		return nil, err
	}
	groups, err := classes.New(cfg.Classes)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		cfg:        cfg,
		deps:       deps,
		mark:       ids.Mark(cfg.StateDir),
		meters:     meters,
		classes:    groups,
		labels:     label.New(selinux, cfg.PauseProgram, cfg.StateDir),
		records:    records.At(cfg.StateDir),
		sandboxes:  index.New[records.PodName, *Sandbox]("pod"),
		containers: index.New[records.ContainerName, *Container]("container"),
		pulls:      flight.Group[pullKey, *storage.Image]{Patience: abandonedPullTime, MostAbandoned: mostAbandonedPulls},
		profiles:   flight.Group[pullKey, bool]{Patience: abandonedPullTime, MostAbandoned: mostAbandonedPulls},

		userLookups: make(chan struct{}, 2),
		background:  background.New(ctx),
		recoverTime: recoverTime,
	}
	e.now.Store(first)
	e.paths = &hostpath.Paths{HostPaths: hostPaths, Reject: func() []string { return e.policy().RejectMissingMounts }}
	e.cgroups = func() error { return cgroup.Usable(cfg.CgroupDriver) }
	e.pulling, e.endPulls = context.WithCancelCause(context.WithoutCancel(ctx))
	e.cleanups = e.newCleanups()
	deps.Trace.SetNames(e.names.of)
	if e.tuner, err = e.newTuner(); err != nil {
		return nil, err
	}
	e.audit = e.newAuditor()
	e.status = status.New(deps.Runtimes, deps.Images, deps.Network, func() error { return e.cgroups() }, e.background)
	return e, nil
}

// bootID returns the id of this boot of the machine.
func bootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(text)), err
}

// makeDirs makes the two roots.
func (e *Engine) makeDirs() error {
	for _, dir := range []string{e.cfg.RunDir, filepath.Join(e.cfg.RunDir, "pods"), filepath.Join(e.cfg.RunDir, "containers")} {
		// Root of a user namespace passes through (files.Pod.LetIn).
		if err := errors.Join(os.MkdirAll(dir, 0o711), os.Chmod(dir, 0o711)); err != nil {
			return err
		}
	}
	return e.records.Make()
}

// Close cancels pulls, waits for other work in progress and releases the containers,
// which keep running. No new work may be requested. If ctx ends first, the work
// continues until the process ends; the next server resumes it from the records.
func (e *Engine) Close(ctx context.Context) error {
	e.endPulls(errClosing)
	err := errors.Join(e.pulls.Wait(ctx), e.profiles.Wait(ctx), e.creates.Wait(ctx), e.verbs.Wait(ctx))
	e.background.End(errClosing)
	e.pins.close()
	for _, c := range e.containers.All() {
		if task := c.Now().task; task != nil { // there is none after Inspect
			task.Close()
		}
	}
	for _, s := range e.sandboxes.All() {
		if infra := s.Now().infra; infra != nil {
			infra.Close()
		}
	}
	idle := make(chan struct{})
	go func() {
		e.cleanups.Wait()
		e.background.Wait()
		close(idle)
	}()
	select {
	case <-idle:
	case <-ctx.Done():
		err = errors.Join(err, fmt.Errorf("background work did not finish: %w", context.Cause(ctx)))
	}
	return errors.Join(err, e.records.Sync())
}

// run executes the work of a verb in a flight.
func (e *Engine) run(ctx context.Context, v verb, work func(context.Context) error) error {
	_, err := e.verbs.Do(ctx, v, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, e.deps.Trace.Do(ctx, v.name, v.id, work)
	})
	return err
}

// onPod executes the work of a verb on a pod, with its Life held. Unknown ids are no error.
func (e *Engine) onPod(ctx context.Context, name, id string, work func(*Sandbox, context.Context) error) error {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return doneIfAbsent(err)
	}
	return e.run(ctx, verb{name, s.ID}, func(ctx context.Context) error {
		s.LockLife(ctx)
		defer s.Life.Unlock()
		if err := work(s, ctx); err != nil {
			return fmt.Errorf("%s %s: %w", name, s.ID, err)
		}
		return nil
	})
}

// Status returns what is known about the node as a whole.
func (e *Engine) Status() *status.Node { return e.status }

// CgroupDriver returns the driver of the containers' cgroups (CRI: RuntimeConfig).
func (e *Engine) CgroupDriver() cri.CgroupDriver {
	if e.cfg.CgroupDriver == "systemd" {
		return cri.CgroupDriver_SYSTEMD
	}
	return cri.CgroupDriver_CGROUPFS
}
