package oci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/criu"
)

// driver is a Runtime whose handler is known.
type driver interface {
	Runtime
	configured() *entry
	// task returns a container whose monitor has answered.
	task(ctx context.Context, ref Ref, client *conmon.Client) (Task, error)
	// lost returns the Task of a container whose monitor is dead.
	lost(ref Ref, cause error) *gone
	// forget removes the container from the runtime's own state.
	forget(ctx context.Context, ref Ref) error
}

// entry is a handler of the configuration, whatever drives its runtime.
type entry struct {
	name          string
	handler       Handler
	features      *features.Features // from the handler's file; nil: the runtime is asked
	systemd       bool
	monitor       string
	monitorCgroup string
	output        *capture.Budget
	node          *atomic.Pointer[node] // of the table
	prober        prober
	refused       error // why no pod can be made with it, until the table is reloaded; nil: pods can

	// Of a runtime that pods keep, see Table.Bind.
	origin    *Origin       // nil: it is one of the configuration
	successor func() driver // the handler of the same name in the configuration; nil: there is none
	stead     prober        // of its program
}

// node is what concerns new containers of all handlers, also in pods from before a reload.
type node struct {
	log        logs
	attachWait time.Duration
	criu       *criu.Program
}

// logs holds the log settings of conmon.Spec.
type logs struct {
	rate, burst, most int64
	journal           string
}

func (h *entry) Handler() Handler { return h.handler }

func (h *entry) configured() *entry { return h }

// sameAs reports whether two handlers have the same configuration.
func (h *entry) sameAs(other *entry) bool {
	return reflect.DeepEqual(h.handler, other.handler) && reflect.DeepEqual(h.features, other.features) &&
		h.systemd == other.systemd && h.monitorCgroup == other.monitorCgroup
}

// lastProbe returns what Probe found last; nil if it has found nothing yet.
func (h *entry) lastProbe() *Abilities { return h.prober.answer() }

func (h *entry) probe(ctx context.Context, ask question) (*Abilities, error) {
	if h.refused != nil {
		return nil, fmt.Errorf("handler %s: %w", h.name, h.refused)
	}
	if h.origin != nil {
		return h.probeOrigin(ctx, ask)
	}
	a, err := h.prober.probe(ctx, h.handler.Path, ask)
	if err != nil {
		return nil, fmt.Errorf("handler %s: %w", h.name, err)
	}
	return a, nil
}

// create makes what every runtime needs, its root and the bundle, and has the
// monitor of s create the container. who is the name of the runtime in errors.
func (h *entry) create(ctx context.Context, who string, a *Abilities, ref Ref, spec *specs.Spec, s conmon.Spec) (*conmon.Client, error) {
	if err := cmp.Or(a.CanServe(h.name, h.handler), checkProcess(spec.Process), checkPaths(spec), checkText(spec)); err != nil {
		return nil, err
	}
	if err := trace.Call(ctx, "make runtime root", func() error { return os.MkdirAll(h.handler.Root, 0o700) }); err != nil {
		return nil, err
	}
	setCriuOptions(ref, spec)
	if err := trace.Call(ctx, "write bundle", func() error { return writeSpec(ref.Dir, spec) }); err != nil {
		return nil, fmt.Errorf("write bundle: %w", err)
	}
	if !a.Sandboxed {
		release, err := holdSysfs(ctx, spec)
		if err != nil {
			return nil, err
		}
		defer release()
	}
	s.ID, s.Dir, s.ExitFile, s.PidFile = ref.ID, ref.Dir, ref.ExitFile, pidFile(ref)
	s.Monitor, s.Cgroup = h.monitor, h.monitorCgroup
	now := h.node.Load()
	s.LogRate, s.LogBurst, s.LogMost, s.Journal = now.log.rate, now.log.burst, now.log.most, now.log.journal
	s.AttachWait = now.attachWait
	ctx, cancel := context.WithTimeoutCause(ctx, h.handler.CreateTimeout,
		fmt.Errorf("%s did not create the container within %s: %w", who, h.handler.CreateTimeout, fault.Timeout))
	defer cancel()
	client, err := conmon.Launch(ctx, s)
	if err != nil {
		return nil, createFailed(ctx, h.name, spec.Process, ref.Cgroup, err)
	}
	if !a.Sandboxed {
		if err := checkCreated(client.PID(), spec); err != nil {
			_ = client.Close()
			return nil, fmt.Errorf("%s create: %w", h.name, err)
		}
	}
	return client, nil
}

// load implements Runtime.Load.
func load(ctx context.Context, d driver, ref Ref) (Task, error) {
	client, err := conmon.Dial(ctx, ref.Dir, ref.ExitFile)
	if errors.Is(err, conmon.ErrLost) {
		return d.lost(ref, err), nil
	}
	if err != nil {
		return nil, fmt.Errorf("reach monitor: %w", err)
	}
	return d.task(ctx, ref, client)
}

// remove implements Runtime.Delete. It ends the monitor first, so that no
// process is left that could still be creating the container.
func remove(ctx context.Context, d driver, ref Ref, killFirst bool) error {
	steps := []struct {
		name string
		do   func(context.Context) error
	}{
		{"stop monitor", func(ctx context.Context) error { return endMonitor(ctx, ref.Dir) }},
		{"kill cgroup", func(ctx context.Context) error { return endCgroup(ctx, ref) }},
		{"runtime delete", func(ctx context.Context) error { return d.forget(ctx, ref) }},
		{"remove cgroup", func(ctx context.Context) error { return removeCgroup(ctx, ref) }},
	}
	if !killFirst {
		steps[1], steps[2] = steps[2], steps[1]
	}
	for _, step := range steps {
		if err := trace.Do(ctx, step.name, step.do); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// lastTime is far longer than a kill takes. A process that hangs on an
// unresponsive file server would not die any sooner with a longer wait.
const lastTime = 10 * time.Second

// endMonitor allows time to ask the monitor to end and then to kill it.
func endMonitor(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*lastTime)
	defer cancel()
	return conmon.Terminate(ctx, dir)
}

func endCgroup(ctx context.Context, ref Ref) error {
	ctx, cancel := context.WithTimeout(ctx, lastTime)
	defer cancel()
	return emptyCgroup(ctx, ref)
}

func resolveMonitorCgroup(configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	own, err := cgroup.Own()
	if err != nil {
		return "", fmt.Errorf("find this service's own cgroup: %w", err)
	}
	// The root cgroup has no service whose end could reach a monitor.
	if own == "/" {
		return "", nil
	}
	return strings.TrimSuffix(own, "/") + "/monitors", nil
}
