package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/cmd/crius/cli"
	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/server/control"
	"github.com/crius-run/crius/storage"
)

// settings are the configuration in force, parts of which SIGHUP changes.
type settings struct {
	load  func() (*config.Loaded, error)
	level *slog.LevelVar

	reloads  sync.Mutex // held from reading the files until they are in force
	consumer *consumers // nil: the server has not come so far; guarded by reloads

	mu      sync.Mutex     // nobody waits or reads files with it
	inForce *config.Loaded // changes with reloads held
}

// consumers use live options. Those of Table are apart, since it is there first.
type consumers struct {
	records interface{ Set(level, file string) }
	images  interface {
		Prepare(cfg storage.Config) (apply func(), err error)
	}
	engine interface {
		Prepare(ctx context.Context, cfg pod.Options) (apply func(), err error)
	}
	network  interface{ Configure(cfg network.Config) }
	sessions interface {
		Bound(idle time.Duration, most, mostEach int)
	}
	monitor string // of podOptions
}

// prepare checks what a configuration means for all consumers, and returns a function that has it
// take effect. There may be no consumers yet.
func (c *consumers) prepare(ctx context.Context, cfg config.Config) (apply func(), err error) {
	if c == nil {
		return func() {}, nil
	}
	images, err := c.images.Prepare(cfg.Image)
	if err != nil {
		return nil, err
	}
	engine, err := c.engine.Prepare(ctx, podOptions(cfg, c.monitor))
	if err != nil {
		return nil, err
	}
	return func() {
		images()
		engine()
		c.records.Set(cfg.API.Audit, cfg.API.AuditFile)
		c.network.Configure(cfg.Network)
		c.sessions.Bound(cfg.API.StreamIdleTimeout, cfg.API.StreamMaxSessions, cfg.API.StreamMaxSessionsEach)
	}, nil
}

// follow gives the consumers the configuration in force, which an early reload may have changed, and
// what later reloads make of it.
func (s *settings) follow(ctx context.Context, c *consumers) {
	s.reloads.Lock()
	defer s.reloads.Unlock()
	s.consumer = c
	apply, err := c.prepare(ctx, s.loaded().Config)
	if err != nil {
		slog.ErrorContext(ctx, "configuration of an early reload not applied: correct it and reload again", "err", err)
		return
	}
	apply()
}

func (s *settings) loaded() *config.Loaded {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inForce
}

// onSignal calls f at each signal sig until stop is called. SIGHUP must not end the server,
// however early it arrives.
func onSignal(ctx context.Context, sig os.Signal, f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	came := make(chan os.Signal, 1)
	signal.Notify(came, sig)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-ctx.Done():
				return
			case <-came:
				f(ctx)
			}
		}
	}()
	return func() {
		cancel()
		<-done
		signal.Stop(came)
	}
}

// reloadable makes SIGHUP reload the settings until ignore is called. reload returns the
// result to its caller; the result of a signal is only logged.
func (s *settings) reloadable(ctx context.Context, runtimes *oci.Table) (reload func(context.Context) (control.Reloaded, error), ignore func()) {
	reload = func(ctx context.Context) (control.Reloaded, error) { return s.reload(ctx, runtimes) }
	return reload, onSignal(ctx, unix.SIGHUP, func(ctx context.Context) { _, _ = reload(ctx) })
}

// reload reads the configuration again and applies the live options: all of them, or none
// if there is any error. It logs the result.
func (s *settings) reload(ctx context.Context, runtimes *oci.Table) (result control.Reloaded, err error) {
	s.reloads.Lock()
	defer s.reloads.Unlock()
	loaded, err := s.load()
	if err == nil {
		result, err = s.apply(ctx, loaded, runtimes)
	}
	if err != nil {
		slog.ErrorContext(ctx, "configuration not reloaded, still using the old one: correct it and reload again", "err", err)
		return result, err
	}
	reportRuntimes(ctx, s.loaded(), runtimes)
	return result, nil
}

// reportRuntimes logs the handlers and hooks of the node's containers.
func reportRuntimes(ctx context.Context, loaded *config.Loaded, runtimes *oci.Table) {
	for _, text := range loaded.Ignored {
		slog.WarnContext(ctx, "part of runtime.crio_handlers_dir has no effect", "what", text)
	}
	reportHandlers(ctx, runtimes)
	reportHooks(ctx, loaded.Config.Runtime.HooksDir)
}

// reloader is the part of oci.Table that a reload changes.
type reloader interface{ Reload(oci.Config) error }

// apply wants reloads held.
func (s *settings) apply(ctx context.Context, wanted *config.Loaded, runtimes reloader) (result control.Reloaded, err error) {
	before := s.loaded()
	next := before.Reloaded(wanted)
	level, err := logx.Level(next.Config.LogLevel)
	if err != nil {
		return result, err
	}
	takeEffect, err := s.consumer.prepare(ctx, next.Config)
	if err != nil {
		return result, err
	}
	if err := runtimes.Reload(next.Config.Runtime); err != nil {
		return result, err
	}
	s.level.Set(level)
	takeEffect()
	result = control.Reloaded{Changed: config.Differences(before, next), Later: config.Differences(next, wanted)}
	s.mu.Lock()
	s.inForce = next
	s.mu.Unlock()
	switch {
	case len(result.Changed) > 0:
		slog.Info("configuration reloaded", "changed", result.Changed)
	case len(result.Later) == 0:
		slog.Info("configuration reloaded, no option has changed")
	}
	if len(result.Later) > 0 {
		slog.Warn("changed options take effect after a restart", "keys", result.Later)
	}
	return result, nil
}

func (p *program) reloadCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Have the running server read its configuration again",
		Long: "Have the running server read its configuration again, and say which options have changed. Like SIGHUP, " +
			"but it fails with the reason if the server rejects the configuration; the server then keeps the current one.\n\n" + reloaded(),
		Args: cli.Operands,
	}
	format := cli.FormatFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := p.loadForClient(cmd)
		if err != nil {
			return err
		}
		socket := controlSocket(loaded.Config)
		result, err := control.NewClient(socket).Reload(cmd.Context())
		if err != nil {
			switch away := cli.Unserved(cmd.Context(), socket); {
			case away != nil:
				return away
			case errors.Is(err, control.ErrRefused):
				return fmt.Errorf("%w: the server may be older than this command; restart it or send it SIGHUP", err)
			}
			return err
		}
		return format.Print(cmd.OutOrStdout(), result, func(w io.Writer) { writeReloaded(w, result) })
	}
	return cmd
}

func writeReloaded(w io.Writer, r control.Reloaded) {
	if len(r.Changed)+len(r.Later) == 0 {
		fmt.Fprintln(w, "no option has changed")
	}
	for _, key := range r.Changed {
		fmt.Fprintf(w, "changed: %s\n", key)
	}
	for _, key := range r.Later {
		fmt.Fprintf(w, "needs a restart: %s", key)
		if why := config.WhyRestart(key); why != "" {
			fmt.Fprintf(w, " (%s)", why)
		}
		fmt.Fprintln(w)
	}
}

// reportHandlers logs the state of each handler.
func reportHandlers(ctx context.Context, runtimes *oci.Table) {
	reports, errs := runtimes.Report(ctx)
	for i, r := range reports {
		switch {
		case r.Ready:
			slog.InfoContext(ctx, "runtime handler is ready", "handler", r.Name, "path", r.Path, "version", r.Version, "sandboxed", r.Sandboxed)
			reportVulnerabilities(ctx, r)
		case errors.Is(errs[i], oci.ErrNotInstalled) && !r.Default:
			slog.DebugContext(ctx, "runtime handler not available", "handler", r.Name, "err", r.Error)
		default:
			slog.WarnContext(ctx, "runtime handler cannot be used", "handler", r.Name, "err", r.Error)
		}
	}
}

func reportVulnerabilities(ctx context.Context, r oci.Report) {
	var cves []string
	for _, v := range r.Vulnerabilities {
		cves = append(cves, v.CVE)
	}
	if len(cves) > 0 {
		slog.WarnContext(ctx, "runtime has known vulnerabilities: update it, or list those that its package has fixed in runtime.backported_cves; see crius check",
			"handler", r.Name, "version", r.Version, "cves", cves)
	}
}
