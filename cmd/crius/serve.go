package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/inherit"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/proc"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/server"
	"github.com/crius-run/crius/server/control"
	"github.com/crius-run/crius/server/metrics"
	"github.com/crius-run/crius/server/otlp"
	"github.com/crius-run/crius/server/statuspage"
	"github.com/crius-run/crius/server/stream"
	"github.com/crius-run/crius/server/trail"
	"github.com/crius-run/crius/storage"
)

// drainTime is how long a stopping server waits for calls in progress, and then again for
// their work. The next server continues longer work from the records.
const drainTime = 20 * time.Second

// orphanPeriod is the longest time until a dead orphan is reaped.
const orphanPeriod = 10 * time.Second

// garbagePercent is how much the heap may grow before it is collected, unless GOGC is set.
// Go's default, twice that, costs 4 MiB on a node with 100 pods and saves almost no CPU
// time.
const garbagePercent = 50

// serve runs the node until ctx ends: it builds the backends from the bottom up, recovers
// the state of an earlier server, and serves CRI. Containers are not affected when it ends.
func serve(ctx context.Context, settings *settings, hook trace.Hook) (err error) {
	since := time.Now()
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(garbagePercent)
	}
	inherited := shedInheritance(ctx)
	cfg := settings.loaded().Config
	manager := findManager()
	unlock, err := occupyRoots(ctx, cfg)
	if err != nil {
		return err
	}
	defer closing(&err, unlock)
	counts := metrics.New()
	tracer, endTraces, err := newTracer(ctx, cfg.Tracing, counts)
	if err != nil {
		return err
	}
	defer closing(&err, endTraces)
	tracer.Hook = hook
	backends, err := openServing(ctx, cfg, manager.patient(), tracer)
	if err != nil {
		return err
	}
	defer closing(&err, func() error { return backends.Close(ctx) })
	store, runtimes := backends.store, backends.runtimes
	reportRuntimes(ctx, settings.loaded(), runtimes)
	if backends.plugins, err = newPlugins(cfg.NRI); err != nil {
		return err
	}
	reload, ignore := settings.reloadable(ctx, runtimes)
	defer ignore()
	engine, cni, err := backends.engine(ctx)
	if err != nil {
		return err
	}
	defer closing(&err, func() error { return bounded(ctx, engine.Close) })

	reaping, err := reapOrphans(ctx)
	if err != nil {
		return err
	}
	defer reaping()
	if err := engine.Recover(ctx); err != nil {
		return fmt.Errorf("recover: %w", err)
	}
	backends.pulling.Recover(ctx, engine.CgroupParents())
	engine.CollectNetwork() //nolint:contextcheck // it ends with the engine
	defer startPlugins(ctx, backends.plugins, engine)()
	records := newTrail(ctx, cfg.API, engine)
	defer closing(&err, func() error { return bounded(ctx, records.Close) })
	sessions, err := newSessions(cfg.API, engine, records)
	if err != nil {
		return err
	}
	settings.follow(ctx, &consumers{records: records, images: store, engine: engine, network: cni, sessions: sessions, monitor: runtimes.Monitor()})
	backends.register(ctx, counts, engine, sessions)
	endMetrics, err := serveMetrics(ctx, cfg, counts, engine, backends.page(engine, since))
	if err != nil {
		return err
	}
	defer closing(&err, endMetrics)
	endControl, err := serveControl(ctx, cfg, control.Node{Engine: engine, Store: store, Reload: reload})
	if err != nil {
		return err
	}
	defer closing(&err, endControl)
	tidyFacade(ctx, cfg)
	engine.Status().Watch()
	return answer(ctx, cfg.API, manager, sessions, store.AwaitLost, server.Services{
		Engine: engine, Status: engine.Status(), Usage: engine.Usage(),
		Images: store, PodMetrics: func() []string { return settings.loaded().Config.Metrics.IncludedPodMetrics },
		Sessions: sessions, Trail: records,
		Version: currentVersion().Crius,
		Info: func(ctx context.Context) map[string]string {
			return backends.info(ctx, settings.loaded(), cni, newVitals(since, inherited, engine.Summary(), store.Pulls()))
		},
		Trace: tracer,
	})
}

// shedInheritance resets inherited process attributes so that containers do not get them,
// and returns those that it cannot reset.
func shedInheritance(ctx context.Context) (left []string) {
	left = inherit.Process()
	for _, what := range left {
		slog.WarnContext(ctx, "containers inherit what the server was started with: change its unit, or how it is started", "what", what)
	}
	return left
}

// occupyRoots locks the roots and lets SIGUSR1 save the stacks of goroutines there. Where another crius
// has one of them, it creates nothing.
func occupyRoots(ctx context.Context, cfg config.Config) (leave func() error, err error) {
	if err := pod.RunIsOurs(cfg.RunRoot, cfg.Root); err != nil {
		return nil, err
	}
	if err := storage.CheckOwner(imageOptions(cfg)); err != nil {
		return nil, err
	}
	unlock, err := lockRoots(ctx, cfg, pod.ForkTime)
	if err != nil {
		return nil, err
	}
	if err := pod.NoteLevel(cfg.Root, currentVersion().Crius); err != nil {
		return nil, errors.Join(err, unlock())
	}
	stop := onSignal(ctx, unix.SIGUSR1, func(ctx context.Context) { saveStacks(ctx, cfg.RunRoot) })
	return func() error {
		stop()
		return unlock()
	}, nil
}

// journalSocket is where journald takes entries with fields, also that of a journal namespace.
const journalSocket = "/run/systemd/journal/socket"

// newTrail returns the audit trail, which goes to the journal if the log does.
func newTrail(ctx context.Context, cfg server.Config, engine *pod.Engine) *trail.Trail {
	options := trail.Options{Level: cfg.Audit, File: cfg.AuditFile}
	if logx.Journal(os.Stderr) {
		options.Journal = journalSocket
	}
	return trail.New(ctx, options, engine)
}

// newSessions returns the stream server for the engine's pods and containers.
func newSessions(cfg server.Config, engine *pod.Engine, records *trail.Trail) (*stream.Server, error) {
	streaming := cfg.Stream()
	streaming.Trail = records
	streaming.Namespace = func(id string) string {
		if v, err := engine.Container(id); err == nil {
			id = v.SandboxID
		}
		v, err := engine.Sandbox(id)
		if err != nil {
			return ""
		}
		return v.Config.GetMetadata().GetNamespace()
	}
	streaming.Forwarded = engine.ForwardedTo
	streaming.Text = server.TextFor(engine)
	return stream.New(streaming, engine)
}

// serveControl serves the control socket until end is called.
func serveControl(ctx context.Context, cfg config.Config, node control.Node) (end func() error, err error) {
	s, err := control.Listen(ctx, controlSocket(cfg), node)
	if err != nil {
		return nil, err
	}
	return background(ctx, s.Serve, s.Close), nil
}

// serveMetrics serves metrics, probes and the status page until end is called.
func serveMetrics(ctx context.Context, cfg config.Config, counts *metrics.Metrics, engine *pod.Engine, page http.Handler) (end func() error, err error) {
	options := metricsOptions(cfg)
	options.Page = page
	options.Healthy = func(ctx context.Context) error { return healthy(ctx, cfg.API.Listen, engine.Status()) }
	s, err := counts.Listen(ctx, options)
	if err != nil {
		return nil, err
	}
	return background(ctx, s.Serve, s.Close), nil
}

// register lets the metrics ask their sources.
func (b *backends) register(ctx context.Context, counts *metrics.Metrics, engine *pod.Engine, sessions *stream.Server) {
	counts.Register(ctx, metrics.Sources{Node: engine.Summary, Status: engine.Status().Last, Sizes: b.store.Sizes, Logged: engine.Logged,
		Pulls: b.store.Pulls(), Vulnerable: b.runtimes.Vulnerable, Sessions: sessions.Counts, Version: currentVersion().Crius})
}

// page returns the status page of a server that has been running since then.
func (b *backends) page(engine *pod.Engine, since time.Time) http.Handler {
	return statuspage.Handler(statuspage.Sources{
		Version: currentVersion().Crius, Since: since,
		Node: engine.Summary, Pods: engine.Sandboxes, Containers: engine.Containers,
		Runtime: engine.Status().RuntimeStatus, Network: engine.Status().NetworkStatus,
		Handlers: func(ctx context.Context) []oci.Report { return handlersInfo(ctx, b.runtimes) },
		Pulls:    b.store.Pulls().Active,
	})
}

// newPlugins returns nil if NRI is disabled.
func newPlugins(cfg nri.Config) (*nri.Plugins, error) {
	if !cfg.Enable {
		return nil, nil
	}
	plugins, err := nri.New(cfg, currentVersion().Crius)
	if err != nil {
		return nil, fmt.Errorf("prepare NRI: %w", err)
	}
	return plugins, nil
}

// startPlugins lets NRI plugins connect. It only logs errors, since a node runs pods
// without plugins as well.
func startPlugins(ctx context.Context, plugins *nri.Plugins, engine *pod.Engine) (end func()) {
	if plugins == nil {
		return func() {}
	}
	if err := plugins.Start(ctx, pod.PluginNode{Engine: engine}); err != nil {
		slog.ErrorContext(ctx, "NRI plugins cannot connect", "err", err)
	}
	return func() { _ = bounded(ctx, plugins.Close) }
}

// handlersInfo returns the handlers' part of a verbose Status.
func handlersInfo(ctx context.Context, runtimes *oci.Table) []oci.Report {
	ctx, cancel := context.WithTimeout(ctx, oci.StatusTime)
	defer cancel()
	reports, _ := runtimes.Report(ctx)
	return reports
}

// newTracer returns a tracer that reports steps to counts and, if configured, to a
// collector of traces.
func newTracer(ctx context.Context, cfg otlp.Config, counts *metrics.Metrics) (_ *trace.Tracer, end func() error, err error) {
	traces, err := otlp.New(ctx, cfg, currentVersion().Crius)
	if err != nil && cfg.Endpoint == "" { // the variables may be meant for other programs
		slog.WarnContext(ctx, "no traces are sent: the OTEL_ variables of the environment cannot be used", "err", err)
		err = nil
	}
	if traces == nil {
		return trace.New(counts), func() error { return nil }, err
	}
	return trace.New(counts, traces), func() error { return bounded(ctx, traces.Close) }, nil
}

// answer serves CRI and its sessions until ctx ends, then drains. It also ends with the
// error of lost, from which only a new process can recover; lost returns nil when ctx ends.
func answer(ctx context.Context, cfg server.Config, manager manager, sessions *stream.Server, lost func(context.Context) error, services server.Services) (err error) {
	defer closing(&err, func() error { return bounded(ctx, sessions.Close) })
	srv, err := server.New(cfg, services)
	if err != nil {
		return err
	}
	listener, err := server.Listen(ctx, cfg)
	if err != nil {
		return err
	}
	servers := []func() error{func() error { return srv.Serve(listener) }, sessions.Serve}
	if cfg.CrioSocket != "" {
		crio, err := server.ListenAsCrio(ctx, cfg)
		if err != nil {
			return errors.Join(err, listener.Close())
		}
		servers = append(servers, func() error { return srv.ServeAsCrio(ctx, crio) })
	}
	served := make(chan error, len(servers)+1)
	for _, serve := range servers {
		go func() { served <- serve() }()
	}
	go func() {
		if err := lost(ctx); err != nil {
			served <- err
		}
	}()
	slog.InfoContext(ctx, "crius serves CRI", "version", services.Version, "socket", cfg.Listen)
	manager.notify("READY=1")
	defer manager.watch(ctx, cfg.Listen)()
	select {
	case err := <-served: // no drain: calls that need the store would never end
		manager.notify("STOPPING=1")
		now, cancel := context.WithCancel(ctx)
		cancel()
		_ = srv.Shutdown(now)
		return err
	case <-ctx.Done():
	}
	manager.notify("STOPPING=1")
	slog.Info("crius stopping, containers keep running")
	for _, w := range services.Trace.Active() {
		slog.Info("stopping waits for an operation", "operation", w.Operation, "object", w.Object, "object_name", w.Name, "step", w.Step, "waits_for", w.WaitsFor)
	}
	err = errors.Join(bounded(ctx, sessions.Close), bounded(ctx, srv.Shutdown))
	for range servers {
		err = errors.Join(err, <-served)
	}
	return err
}

// info returns the information of a verbose Status.
func (b *backends) info(ctx context.Context, loaded *config.Loaded, cni *network.Network, server vitals) map[string]string {
	return statusInfo(map[string]any{
		"config": loaded.Config.Tables(), "settings": loaded.Settings(), "network": cni.Info(), "handlers": handlersInfo(ctx, b.runtimes),
		"plugins": b.plugins.Report(), "server": server.on(host{"/"}, loaded.Config),
	})
}

// statusInfo encodes each part as JSON.
func statusInfo(parts map[string]any) map[string]string {
	info := make(map[string]string)
	for name, part := range parts {
		text, err := json.Marshal(part)
		if err != nil {
			slog.Error("cannot report a part of the node's status", "part", name, "err", err)
			continue
		}
		info[name] = string(text)
	}
	return info
}

// background runs serve until the returned function is called, which calls close and
// returns the errors of both.
func background(ctx context.Context, serve func() error, close func(context.Context) error) func() error {
	ended := make(chan error, 1)
	go func() { ended <- serve() }()
	return func() error { return errors.Join(bounded(ctx, close), <-ended) }
}

// bounded calls end with a time limit, even if ctx has ended.
func bounded(ctx context.Context, end func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	return end(ctx)
}

// closing joins the error of a deferred close to err.
func closing(err *error, end func() error) { *err = errors.Join(*err, end()) }

// reapOrphans makes this process the reaper of orphaned exec processes.
func reapOrphans(ctx context.Context) (stop func(), err error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	died := make(chan os.Signal, 1)
	signal.Notify(died, unix.SIGCHLD)
	reaper, err := proc.NewReaper()
	if err != nil {
		cancel()
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		reaper.Run(ctx, orphanPeriod, died)
	}()
	return func() {
		cancel()
		<-done
		signal.Stop(died)
	}, nil
}
