package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"slices"
	"sync"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
)

// settings are the configuration in force, which SIGHUP changes in part.
type settings struct {
	load  func() (*config.Loaded, error)
	level *slog.LevelVar

	mu      sync.Mutex
	inForce *config.Loaded
}

func (s *settings) loaded() *config.Loaded {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inForce
}

// onSignal calls f at each such signal until the function that it returns is called.
// SIGHUP must not end the server, however early it comes: whoever sends it wants the
// opposite.
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

// reload reads the configuration again and puts in force what can be without a
// restart: all of that, or nothing where anything is wrong.
func (s *settings) reload(ctx context.Context, runtimes *oci.Table) {
	loaded, err := s.load()
	if err == nil {
		err = s.apply(loaded, runtimes)
	}
	if err != nil {
		slog.ErrorContext(ctx, "configuration not reloaded, still using the old one: correct it and send SIGHUP again", "err", err)
		return
	}
	reportRuntimes(ctx, s.loaded().Config.Runtime, runtimes)
}

// reportRuntimes logs what the node's containers are run by.
func reportRuntimes(ctx context.Context, cfg oci.Config, runtimes *oci.Table) {
	reportHandlers(ctx, runtimes)
	reportHooks(ctx, cfg.HooksDir)
}

func (s *settings) apply(wanted *config.Loaded, runtimes *oci.Table) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.inForce.Reloaded(wanted)
	level, err := logx.Level(next.Config.LogLevel)
	if err != nil {
		return err
	}
	if err := checkProfiles(next.Config.Runtime); err != nil {
		return err
	}
	if err := runtimes.Reload(next.Config.Runtime); err != nil {
		return err
	}
	s.level.Set(level)
	changed, later := config.Differences(s.inForce, next), config.Differences(next, wanted)
	s.inForce = next
	slog.Info("configuration reloaded", "changed", changed)
	if len(later) > 0 {
		slog.Warn("changed options take effect after a restart", "keys", later)
	}
	return nil
}

// checkProfiles reads the seccomp profiles of all handlers.
func checkProfiles(cfg oci.Config) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(cfg.Handlers)) {
		if path := cfg.Handlers[name].SeccompProfile; path != "" {
			if _, err := spec.LoadProfile(path); err != nil {
				errs = append(errs, fmt.Errorf("runtime.handlers.%s.seccomp_profile: %w", name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// reportHandlers logs what each handler turned out to be.
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
