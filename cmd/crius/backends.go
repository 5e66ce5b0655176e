package main

import (
	"context"
	"path/filepath"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/storage"
)

// backends are what an engine stands on. Who opens them has locked the state, for
// that also tidies up.
type backends struct {
	cfg      config.Config // as the rooms want it
	store    *storage.Store
	runtimes *oci.Table
	tracer   *trace.Tracer
	plugins  *nri.Plugins // nil: none
}

func openBackends(ctx context.Context, cfg config.Config, tracer *trace.Tracer) (*backends, error) {
	cfg.Image.StateDir = cfg.Root
	store, err := openStore(ctx, tracer, cfg.Image)
	if err != nil {
		return nil, err
	}
	runtimes, err := oci.NewTable(cfg.Runtime, cfg.RunRoot)
	if err != nil {
		closing(&err, func() error { return store.Close(ctx) })
		return nil, err
	}
	cfg.Network.PodCIDRFile = filepath.Join(cfg.Root, "pod-cidr")
	cfg.Pod.CgroupDriver = cfg.Runtime.CgroupDriver
	cfg.Pod.HookDirs = cfg.Runtime.HooksDir
	cfg.Pod.PauseProgram = runtimes.Monitor()
	cfg.Pod.ImageVolumes = cfg.Image.Volumes
	if cfg.API.CrioSocket != "" {
		cfg.Pod.CgroupPrefix = spec.CrioPrefix
	}
	return &backends{cfg: cfg, store: store, runtimes: runtimes, tracer: tracer}, nil
}

// openStore opens the image store, which ends what a dead server had begun.
func openStore(ctx context.Context, tracer *trace.Tracer, cfg storage.Config) (store *storage.Store, err error) {
	err = tracer.Do(ctx, "open image store", cfg.Root, func(ctx context.Context) (err error) {
		store, err = storage.Open(ctx, cfg)
		return err
	})
	return store, err
}

// engine makes one that has not recovered. A second one has a network of its
// own, since that knows the pods of the first.
func (b *backends) engine(ctx context.Context) (*pod.Engine, *network.Network, error) {
	cni := network.New(b.cfg.Network)
	engine, err := pod.New(ctx, b.cfg.Pod, pod.Deps{Images: b.store, Network: cni, Runtimes: b.runtimes, Trace: b.tracer, Plugins: b.plugins})
	return engine, cni, err
}

func (b *backends) Close(ctx context.Context) error { return b.store.Close(ctx) }

// controlSocket is where a server lets itself be asked to check and to wipe.
func controlSocket(cfg config.Config) string { return filepath.Join(cfg.RunRoot, "control.sock") }
