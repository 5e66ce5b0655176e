package main

import (
	"context"
	"log/slog"
	"path/filepath"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/logx"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/classes"
	"github.com/crius-run/crius/oci/pullcgroup"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/server/metrics"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/unpack"
)

// backends are the parts that an engine needs. Opening them also cleans up, so the caller
// must have locked the state.
type backends struct {
	cfg      config.Config
	store    *storage.Store
	runtimes *oci.Table
	tracer   *trace.Tracer
	plugins  *nri.Plugins // nil: none
	pulling  *pullcgroup.Groups
}

// openServing opens the backends of a server, which also pulls images. It calls progress
// during the post-crash check (storage.Options).
func openServing(ctx context.Context, cfg config.Config, progress func(), tracer *trace.Tracer) (*backends, error) {
	if err := pullCgroupOf(cfg).Ready(); err != nil {
		slog.WarnContext(ctx, "image.pull_cgroup: images cannot be pulled", "err", err)
	}
	pulling := pullcgroup.New(pullCgroupOf(cfg))
	unpacker, err := unpack.FindProgram()
	if err != nil {
		slog.WarnContext(ctx, "images are unpacked by crius itself, which takes more CPU", "err", err)
	}
	image := imageOptions(cfg)
	image.CheckProgress, image.PullCgroups, image.Unpacker = progress, pulling, unpacker
	opened, err := openBackends(ctx, cfg, image, tracer)
	if err != nil {
		return nil, err
	}
	opened.pulling = pulling
	context.AfterFunc(ctx, opened.store.Pulls().Interrupt)
	return opened, nil
}

// openBackends opens the backends, the image store with the options image (imageOptions).
func openBackends(ctx context.Context, cfg config.Config, image storage.Options, tracer *trace.Tracer) (*backends, error) {
	store, err := openStore(ctx, tracer, image)
	if err != nil {
		return nil, err
	}
	runtimes, err := oci.NewTable(cfg.Runtime, cfg.RunRoot)
	if err != nil {
		closing(&err, func() error { return store.Close(ctx) })
		return nil, err
	}
	return &backends{cfg: cfg, store: store, runtimes: runtimes, tracer: tracer}, nil
}

// openStore opens the image store, which also finishes the work of a dead server.
func openStore(ctx context.Context, tracer *trace.Tracer, options storage.Options) (store *storage.Store, err error) {
	err = tracer.Do(ctx, "open image store", options.StateDir, func(ctx context.Context) (err error) {
		store, err = storage.Open(ctx, options)
		return err
	})
	return store, err
}

// engine returns an engine that has not recovered yet, with a network of its own, since a
// network knows the pods of its engine.
func (b *backends) engine(ctx context.Context) (*pod.Engine, *network.Network, error) {
	cni := network.New(network.Options{Config: b.cfg.Network, PodCIDRFile: filepath.Join(b.cfg.Root, "pod-cidr")})
	engine, err := pod.New(ctx, podOptions(b.cfg, b.runtimes.Monitor()), pod.Deps{Images: b.store, Profiles: b.store.Profiles, Network: cni, Runtimes: b.runtimes, Trace: b.tracer, Plugins: b.plugins})
	if err == nil {
		logx.SetNames(engine.NamesForLog)
	}
	return engine, cni, err
}

func (b *backends) Close(ctx context.Context) error { return b.store.Close(ctx) }

func imageOptions(cfg config.Config) storage.Options {
	return storage.Options{Config: cfg.Image, StateDir: cfg.Root}
}

func pullCgroupOf(cfg config.Config) pullcgroup.Config {
	return pullcgroup.Config{Driver: cfg.Runtime.CgroupDriver, Parent: cfg.Image.PullCgroup}
}

func podOptions(cfg config.Config, monitor string) pod.Options {
	options := pod.Options{
		Config:       cfg.Pod,
		Paths:        pod.Paths{StateDir: cfg.Root, RunDir: cfg.RunRoot},
		CgroupDriver: cfg.Runtime.CgroupDriver,
		PauseProgram: monitor,
		ImageVolumes: cfg.Image.Volumes,
		HookDirs:     cfg.Runtime.HooksDir,
		Restore:      cfg.Runtime.Restore,
		RestoreKeys:  cfg.Runtime.RestoreKeys,
		Workloads:    cfg.Runtime.Workloads,
		Tuning:       cfg.Tuning,
		Classes:      classes.Config{BlockIOFile: cfg.Runtime.BlockIOFile, RDTFile: cfg.Runtime.RDTFile},
	}
	if cfg.API.CrioSocket != "" {
		options.CgroupPrefix = spec.CrioPrefix
	}
	return options
}

func metricsOptions(cfg config.Config) metrics.Options {
	return metrics.Options{Config: cfg.Metrics, Socket: filepath.Join(cfg.RunRoot, "metrics.sock"), TLS: cfg.API.TLS()}
}

// controlSocket is the path of the socket on which a server accepts checks, wipes and
// reloads.
func controlSocket(cfg config.Config) string { return filepath.Join(cfg.RunRoot, "control.sock") }
