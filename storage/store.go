// Package storage keeps images and root file systems. It is the only user of containers/storage and
// containers/image, the libraries of podman, skopeo and buildah: pods can use the images that those
// programs have pulled, and the other way round.
//
// # Images
//
// containers/storage owns layers and images; crius adds no record of its own. An image's id is the
// 64 hexadecimal digits under which containers/storage keeps it (the digest of its config), and it
// is the same string in Images, Image and Pull. OCI artifacts, which have files and no layers, are
// images to all methods; package artifact keeps them.
//
// Package pull pulls images: package registry and the packages below it talk to registries, and
// package unpack has layers unpacked by a confined process. A pull is bounded in time, leaves
// nothing behind except bounded downloads, which the next pull resumes, and sends credentials to no
// registry for which they are not meant. docs/pull.md describes all of it.
//
// # Root file systems
//
// A container's root file system is an overlay mount that crius makes itself: the image's layers
// below, an upper directory of crius's own on top. See docs/decisions/0001-writable-layer.md. While
// root file systems use an image, a container record in containers/storage, called
// crius-holds-<image id>, protects its layers from all programs; it is deleted a minute after the
// last use. Remove refuses to remove an image in use.
//
// # Programs
//
// A program that opens a Store must call Init first thing in main. Layers are unpacked by another
// program, crius-unpack (package unpack/worker).
package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/reexec"

	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/foreign"
	"github.com/crius-run/crius/storage/liblog"
	"github.com/crius-run/crius/storage/pull"
	"github.com/crius-run/crius/storage/pull/notice"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/quota"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/registry/verifier"
	"github.com/crius-run/crius/storage/reserve"
	"github.com/crius-run/crius/storage/unpack"
)

// Init must be the first call of main, before flags are parsed:
//
//	if storage.Init() {
//		return
//	}
//
// containers/storage starts its own program again to work in other directories or namespaces, and
// crius starts itself to copy an image in a format that crius-unpack does not know. In such a
// process Init does that work, and returns true. It also makes the two libraries log through slog.
func Init() bool {
	unpack.Register()
	if reexec.Init() {
		return true
	}
	liblog.Capture(func(ctx context.Context, level slog.Level, text string) {
		if !notice.Heard(text) {
			liblog.Log(ctx, level, pullerror.Cut(pullerror.Redact(text)))
		}
	})
	liblog.Listen(func(text string) { notice.Heard(text) })
	return false
}

// Store is the images and root file systems of a node. Its methods are safe for concurrent use.
type Store struct {
	Foreign  *foreign.Containers // of other runtimes
	Profiles *Profiles           // pulled security profiles

	cfg          Options // at first; a reload changes those of now
	live         atomic.Pointer[Config]
	store        cstorage.Store
	roots        durable.Roots // of store
	locks        *durable.Locks
	images       *catalog
	artifacts    *artifacts
	holds        *holds
	leftovers    *durable.Leftovers
	downloads    *download.Dir
	reserve      reserve.File
	mountOptions []string // of every root file system
	usage        usageCache
	imageUsage   *imageUsage
	probe        probe
	manifest     *durable.Manifest
	device       func() string // of the file system of the writable layers
	pulls        progress.Counts
	policies     *trust.Policies
	verifiers    *verifier.Verifiers
	puller       *pull.Puller
	unwatch      func() // see durable.Locks.Panicked

	containersDir string          // with all writable layers
	projects      *quota.Projects // of the writable layers
	background    sync.WaitGroup  // the measuring of disk usage
}

// Close releases the store, after the last call of another method has returned. It does so even if
// ctx has ended. Mounted root file systems stay mounted.
func (s *Store) Close(ctx context.Context) error {
	s.usage.closed.Store(true)
	s.background.Wait()
	s.unwatch()
	locked := s.locks.Await(context.WithoutCancel(ctx), durable.ToWrite)
	err := s.holds.close(context.WithoutCancel(ctx), locked)
	if locked == nil {
		_, shutdownErr := s.store.Shutdown(false)
		if !errors.Is(shutdownErr, cstorage.ErrLayerUsedByContainer) { // a container of another tool is running
			err = errors.Join(err, shutdownErr)
		}
	}
	if err := errors.Join(err, s.artifacts.Close(), s.Profiles.store.Close(), s.downloads.Close(), s.leftovers.Close(), s.locks.Close(), s.puller.Program.Close()); err != nil {
		return fmt.Errorf("close image store: %w", err)
	}
	return nil
}

// Forget removes the files of crius in the graph root, which other tools share, for a wipe. Call it
// after the images have been removed, and then only Close.
func (s *Store) Forget() error {
	errs := []error{s.manifest.Remove()} // first: with it the next start would require the owner of the imagestore
	for _, root := range s.roots.All() {
		errs = append(errs, os.RemoveAll(filepath.Join(root, reserve.Name)), os.RemoveAll(filepath.Join(root, ownerName)), os.RemoveAll(artifact.In(root)), os.RemoveAll(profilesIn(root)))
	}
	errs = append(errs, s.leftovers.Remove(), s.downloads.Delete(), s.downloads.DeleteElsewhere(s.roots.All()))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove what crius keeps in the image store: %w", err)
	}
	return nil
}

// registries returns where the node has its configuration of registries.
func (s *Store) registries() registry.Config {
	cfg := s.now()
	return registry.Config{RegistriesConf: cfg.RegistriesConf, AuthFile: cfg.AuthFile, RunRoot: s.store.RunRoot(), ShortNameMode: cfg.ShortNameMode}
}

// now returns the configuration in force.
func (s *Store) now() *Config { return s.live.Load() }

// Prepare checks a configuration that a reload has changed, and returns a function that has it take
// effect for pulls and containers that begin afterwards, and for the pinning of all images. It cannot
// fail. Options that need a restart must be as they were.
func (s *Store) Prepare(cfg Config) (apply func(), err error) {
	if s.cfg.StateDir != "" {
		if err := s.projects.With(s.cfg.limits(&cfg)).Check(); err != nil {
			return nil, err
		}
	}
	return func() {
		s.live.Store(&cfg)
		s.policies.Use(cfg.SignaturePolicy, cfg.SignaturePolicyDir)
		s.verifiers.Use(cfg.VerifiersDir, cfg.VerifierTimeout)
		s.puller.Settings.Store(s.pullSettings())
		s.downloads.Connections.Store(int64(cfg.PullConnections))
		s.artifacts.SetConnections(cfg.PullConnections)
		s.images.repin()
	}, nil
}

// Info describes the store for Status(verbose).
func (s *Store) Info() map[string]any {
	return map[string]any{
		"graphRoot":  s.store.GraphRoot(),
		"runRoot":    s.store.RunRoot(),
		"imageStore": s.store.ImageStore(),
		"driver":     s.store.GraphDriverName(),
		"options":    slices.Clone(s.store.GraphOptions()),
	}
}
