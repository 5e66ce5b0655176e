package oci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/runtime-spec/specs-go/features"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/capture"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/oci/criu"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/oci/version"
)

// Table holds the handlers of the configuration.
type Table struct {
	monitor string
	runDir  string
	output  *capture.Budget // of the Execs of all handlers
	now     atomic.Pointer[handlers]
	node    atomic.Pointer[node]
	version atomic.Uint64

	changing sync.Mutex // held by Reload and Bind: what pods keep must not get lost in between
}

// handlers are those of one configuration.
type handlers struct {
	defaultName string
	byName      map[string]driver
	backported  []string // CVEs
	cfg         Config

	mu    sync.Mutex
	bound map[binding]driver // what pods keep
}

// binding is a handler's name and an origin in JSON.
type binding struct{ name, origin string }

// kept returns what pods keep.
func (h *handlers) kept() map[binding]driver {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.bound)
}

// NewTable makes the handlers of cfg. Runtimes keep their own state below
// runDir unless their configuration says otherwise. A missing binary is not an
// error here: Probe reports it for as long as it lasts. Nor is a file that a
// handler names and that cannot be read, unless it is the default one: Probe
// reports it until the next Reload.
func NewTable(cfg Config, runDir string) (*Table, error) {
	monitor, err := findMonitor(cfg.Monitor)
	if err != nil {
		return nil, err
	}
	t := &Table{monitor: monitor, runDir: runDir, output: capture.NewBudget(maxOutputInSum)}
	t.now.Store(&handlers{})
	t.node.Store(&node{criu: criu.New(cfg.Criu)})
	return t, t.reload(cfg, func(name string) bool { return name != cfg.DefaultHandler })
}

// Reload replaces the handlers with those of cfg: all of them or, on an error,
// none. Pods keep the handler that they were made with.
func (t *Table) Reload(cfg Config) error {
	return t.reload(cfg, func(string) bool { return false })
}

// reload asks mayRefuse whether a handler that cannot be used may be in the table all the same.
func (t *Table) reload(cfg Config, mayRefuse func(name string) bool) error {
	t.changing.Lock()
	defer t.changing.Unlock()
	before := t.now.Load()
	next := &handlers{
		defaultName: cfg.DefaultHandler, byName: make(map[string]driver), backported: cfg.BackportedCVEs,
		cfg: cfg, bound: make(map[binding]driver),
	}
	for name, handler := range cfg.Handlers {
		runtime, err := t.runtime(next, name, handler)
		if err != nil && (runtime == nil || !mayRefuse(name)) {
			return err
		}
		runtime.configured().refused = err
		// An unchanged handler already knows its binary.
		if old := before.byName[name]; old != nil && old.configured().refused == nil && old.configured().sameAs(runtime.configured()) {
			runtime = old
		}
		next.byName[name] = runtime
	}
	if _, ok := next.byName[next.defaultName]; !ok {
		return fmt.Errorf("runtime.default_handler %q is not in runtime.handlers (%s): %w",
			next.defaultName, strings.Join(next.names(), ", "), fault.Invalid)
	}
	for one, old := range before.kept() { // for new pods; others keep the old one
		runtime, err := t.bind(next, one.name, *old.configured().origin)
		if err != nil { // the configuration may not even have this handler any more
			slog.Warn("runtime of earlier pods keeps its earlier configuration", "handler", one.name, "err", err)
			runtime = old
		}
		next.bound[one] = runtime
	}
	t.now.Store(next)
	t.node.Store(t.nodeOf(cfg, before.cfg))
	t.version.Add(1)
	return nil
}

func (t *Table) nodeOf(cfg, before Config) *node {
	next := &node{logs{cfg.LogRate, cfg.LogBurst, cfg.LogMaxSize, cfg.LogJournal}, max(cfg.AttachWait, conmon.NoAttachWait), t.node.Load().criu}
	if cfg.Criu != before.Criu {
		next.criu = criu.New(cfg.Criu)
	}
	return next
}

// DefaultRoot returns where the runtime of a handler keeps its state unless the configuration says
// otherwise.
func DefaultRoot(runDir, handler string) string { return filepath.Join(runDir, "runtime", handler) }

// runtime returns a handler of the configuration, also beside an error that concerns this handler
// alone.
func (t *Table) runtime(h *handlers, name string, handler Handler) (driver, error) {
	if handler.Type != "oci" && handler.Type != "shim" {
		return nil, fmt.Errorf("runtime.handlers.%s.type is %q, use \"oci\" for an OCI runtime or \"shim\" for a containerd shim: %w",
			name, handler.Type, fault.Invalid)
	}
	if handler.Root == "" {
		handler.Root = DefaultRoot(t.runDir, name)
	}
	known, unread := readFeatures(handler.Features)
	if unread != nil {
		unread = fmt.Errorf("runtime.handlers.%s.features: %w", name, unread)
	}
	r, err := t.driver(h, name, handler, known)
	return r, errors.Join(unread, checkFiles(name, handler), err)
}

// checkFiles reads what a handler names for containers.
func checkFiles(name string, handler Handler) (err error) {
	if path := handler.SeccompProfile; path != "" {
		if _, unread := spec.LoadProfile(path); unread != nil {
			err = fmt.Errorf("runtime.handlers.%s.seccomp_profile: %w", name, unread)
		}
	}
	if path := handler.BaseRuntimeSpec; path != "" {
		if _, unread := spec.LoadBase(path); unread != nil {
			err = errors.Join(err, fmt.Errorf("runtime.handlers.%s.base_runtime_spec: %w", name, unread))
		}
	}
	return err
}

// driver makes a handler. known is the content of its features file, nil for
// none.
func (t *Table) driver(of *handlers, name string, handler Handler, known *features.Features) (driver, error) {
	cfg, monitorCgroup := of.cfg, handler.MonitorCgroup
	if monitorCgroup == "" {
		var err error
		if monitorCgroup, err = resolveMonitorCgroup(cfg.MonitorCgroup); err != nil {
			return nil, err
		}
	}
	h := &entry{
		name: name, handler: handler, features: known, systemd: cfg.CgroupDriver == "systemd",
		monitor: t.monitor, monitorCgroup: monitorCgroup, output: t.output, node: &t.node,
	}
	if handler.Type == "oci" {
		return &cli{h}, nil
	}
	return &shimmed{entry: h, server: filepath.Join(t.runDir, "crius")}, nil
}

func (h *handlers) names() []string { return slices.Sorted(maps.Keys(h.byName)) }

// Names lists the handlers in alphabetical order.
func (t *Table) Names() []string { return t.now.Load().names() }

// Monitor returns the path of crius-conmon.
func (t *Table) Monitor() string { return t.monitor }

// Default returns the name of the handler that "" means.
func (t *Table) Default() string { return t.now.Load().defaultName }

// Get returns the handler of that name; "" is the default one.
func (t *Table) Get(name string) (Runtime, error) {
	now := t.now.Load()
	if name == "" {
		name = now.defaultName
	}
	if r, ok := now.byName[name]; ok {
		return r, nil
	}
	return nil, fmt.Errorf("no runtime handler %q: this node has %s; correct the RuntimeClass or add it to runtime.handlers: %w",
		name, strings.Join(now.names(), ", "), fault.NotFound)
}

// Version changes with each Reload.
func (t *Table) Version() uint64 { return t.version.Load() }

// MonitorReady returns why crius-conmon cannot be run now; without it no
// handler can create a container.
func (t *Table) MonitorReady() error {
	if _, err := exec.LookPath(t.monitor); err != nil {
		return fmt.Errorf("monitor %s cannot be run (%w): install crius-conmon there or correct runtime.monitor: %w", t.monitor, errors.Unwrap(err), fault.Unavailable)
	}
	return nil
}

// Ready returns why the default handler cannot create a container now, in the
// same words for as long as that lasts. A runtime that does not answer in time
// counts as in its last answer.
func (t *Table) Ready(ctx context.Context) error {
	if err := t.MonitorReady(); err != nil {
		return err
	}
	now := t.now.Load()
	r := now.byName[now.defaultName]
	a, err := r.Probe(ctx)
	if last := r.configured().lastProbe(); errors.Is(err, fault.Timeout) && last != nil {
		a, err = last, nil
	}
	if err != nil {
		return err
	}
	return a.CanServe(now.defaultName, r.Handler())
}

// Report is the state of a handler, for people.
type Report struct {
	Name    string `json:"name"`
	Default bool   `json:"default,omitempty"`
	Type    string `json:"type"`
	Ready   bool   `json:"ready"`
	Error   string `json:"error,omitempty"` // why it is not ready

	Path      string `json:"path"`
	Version   string `json:"version,omitempty"`
	Sandboxed bool   `json:"sandboxed,omitempty"` // its pods have their own kernel

	UserNamespaces    bool               `json:"idmappedMounts"`
	RecursiveReadOnly bool               `json:"recursiveReadOnlyMounts"`
	Features          *features.Features `json:"features,omitempty"`     // what the runtime reports about itself,
	FeaturesFile      string             `json:"featuresFile,omitempty"` // or this file instead

	Vulnerabilities []version.Vulnerability `json:"vulnerabilities,omitempty"` // by its version
}

// Report returns the present state of each handler, in alphabetical order. The
// errors are those of Probe.
func (t *Table) Report(ctx context.Context) (reports []Report, errs []error) {
	now := t.now.Load()
	names := now.names()
	reports, errs = make([]Report, len(names)), make([]error, len(names))
	var group panics.Group // concurrently: a runtime may hang
	for i, name := range names {
		group.Go(func() { reports[i], errs[i] = now.report(ctx, name) })
	}
	group.Wait()
	return reports, errs
}

func (h *handlers) report(ctx context.Context, name string) (Report, error) {
	r := h.byName[name]
	configured := r.Handler()
	report := Report{Name: name, Default: name == h.defaultName, Type: configured.Type, Path: configured.Path, FeaturesFile: configured.Features}
	a, err := r.Probe(ctx)
	if err != nil {
		report.Error = fault.Text(err)
		return report, err
	}
	if err = a.CanServe(name, configured); err != nil {
		report.Error = fault.Text(err)
	}
	report.Ready, report.Path, report.Version, report.Sandboxed = err == nil, a.Path, a.Version, a.Sandboxed
	report.UserNamespaces, report.RecursiveReadOnly, report.Features = a.IDMap, a.RecursiveReadOnly, a.Features
	report.Vulnerabilities = h.vulnerabilities(a)
	return report, err
}

func (h *handlers) vulnerabilities(a *Abilities) []version.Vulnerability {
	return version.Vulnerabilities(cmp.Or(a.behind, a.Version), h.backported)
}

// Vulnerable returns the CVEs of the handlers' runtimes whose versions are
// already known. It runs nothing.
func (t *Table) Vulnerable() map[string][]string {
	now := t.now.Load()
	known := make(map[string][]string)
	for name, r := range now.byName {
		if a := r.configured().lastProbe(); a != nil {
			for _, v := range now.vulnerabilities(a) {
				known[name] = append(known[name], v.CVE)
			}
		}
	}
	return known
}
