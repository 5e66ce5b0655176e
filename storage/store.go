// Package storage keeps images and root file systems. It is the only user of
// containers/storage and containers/image, the libraries of podman, skopeo and
// buildah: what one of those pulled is here for pods, and the other way round.
//
// # Images
//
// containers/storage owns layers and images; crius adds no record of its own.
// An image's id is the 64 hexadecimal digits under which containers/storage
// keeps it (the digest of its config), and it is the same string in Images,
// Image and Pull. A pull is bounded in time, leaves nothing but bounded downloads that a
// next one resumes (package download), and sends credentials to the registry they are for and nowhere else. This
// process fetches; layers are decompressed and unpacked by a confined one
// (docs/decisions/0019-pull-worker.md). OCI artifacts, which have files and no layers, are
// images to all methods; package artifact keeps them.
//
// # Root file systems
//
// A container's root file system is an overlay mount that crius makes itself:
// the image's layers below, an upper directory of crius's own on top. See
// docs/decisions/0001-writable-layer.md. While root file systems use an image,
// one container record in containers/storage, called crius-holds-<image id>,
// keeps its layers from everybody, other tools included; it goes a minute after
// the last of them. An image that is removed while in use loses its names at
// once and its layers with the last root file system.
//
// # Programs
//
// A program that opens a Store must call Init first thing in main. Layers are unpacked by
// another one, crius-unpack (package unpack).
package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/reexec"
	"go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/owner"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/foreign"
	"github.com/crius-run/crius/storage/liblog"
	"github.com/crius-run/crius/storage/pull"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/quota"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/reserve"
	"github.com/crius-run/crius/storage/unpack"
	"github.com/crius-run/crius/storage/unpack/untar"
)

// Init must be the first call of main, before flags are parsed:
//
//	if storage.Init() {
//		return
//	}
//
// containers/storage starts its own program again to work in other directories
// or namespaces, and crius to copy an image in a format that crius-unpack does not know;
// there Init does that work and says true. It also makes the two libraries log through slog.
func Init() bool {
	unpack.Register()
	if untar.Child() || reexec.Init() {
		return true
	}
	liblog.Capture(func(ctx context.Context, level slog.Level, text string) {
		liblog.Log(ctx, level, pullerror.Cut(pullerror.Redact(text)))
	})
	return false
}

// Store is the node's images and root file systems. Its methods are safe for
// concurrent use.
type Store struct {
	Foreign *foreign.Containers // of other runtimes

	cfg          Options
	store        cstorage.Store
	roots        durable.Roots // of store
	locks        *durable.Locks
	images       *catalog
	artifacts    *artifacts
	holds        *holds
	leftovers    *durable.Leftovers
	downloads    *download.Dir
	reserve      reserve.File
	mountOptions []string // that every root file system gets
	usage        usageCache
	probe        probe
	manifest     *durable.Manifest
	device       func() string // of the file system of the writable layers
	pulls        progress.Counts
	policies     *trust.Policies
	puller       *pull.Puller
	unwatch      func() // see durable.Locks.Panicked

	containersDir string          // in which all writable layers are
	projects      *quota.Projects // of the writable layers
	background    sync.WaitGroup  // the measuring of writable layers
}

// Open opens the store and creates it where there is none. After a reboot it
// looks for what a power cut has damaged: records of containers/storage are
// moved aside, and images are deleted, to be pulled again. All others stay.
//
// A store has one owner, the crius of cfg.StateDir, until Close and for as long
// as that has pods or containers on record. Another one is refused with an
// *owner.TakenError.
func Open(ctx context.Context, cfg Options) (*Store, error) {
	options, err := libraryOptions(cfg.Config)
	if err == nil {
		dropLayerStores(&options)
		err = cfg.takeLimits(&options)
	}
	if err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	manifest := durable.NewManifest(durable.Config{Roots: rootsOf(options), Progress: cfg.CheckProgress,
		Sync: !slices.ContainsFunc(options.GraphDriverOptions, isSyncNone), Reference: holdID})
	if err := manifest.Mounted(ownerName); err != nil {
		return nil, fmt.Errorf("open image store %s: %w", options.ImageStore, err)
	}
	var locks owners
	for _, root := range rootsOf(options).All() {
		option := "image.root"
		if root == options.ImageStore {
			option = "image.imagestore"
		}
		lock, err := own(ctx, root, cfg)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open image store %s: %w", root, withRemedy(err, option)), locks.Close())
		}
		if lock != nil {
			locks = append(locks, owned{lock, root, option})
		}
	}
	s, err := openOwned(ctx, cfg, options, manifest, locks)
	if err != nil {
		return nil, errors.Join(err, locks.Close())
	}
	return s, nil
}

// owners are the locks of a store's directories.
type owners []owned

type owned struct {
	*owner.Lock
	dir, option string
}

// Close gives all directories up. It may be repeated.
func (o owners) Close() error {
	var errs []error
	for _, lock := range o {
		errs = append(errs, lock.Close())
	}
	return errors.Join(errs...)
}

// Lost says which other crius has one of the directories by now.
func (o owners) Lost() error {
	for _, lock := range o {
		if err := lock.Lost(); err != nil {
			return fmt.Errorf("image store %s: %w", lock.dir, withRemedy(err, lock.option))
		}
	}
	return nil
}

// own makes the crius of cfg the owner of the store; for who only looks, it says
// whether that could be.
func own(ctx context.Context, root string, cfg Options) (lock *owner.Lock, err error) {
	if path := filepath.Join(root, ownerName); cfg.ReadOnly {
		err = owner.Look(path, cfg.StateDir)
	} else if err = os.MkdirAll(root, 0o700); err == nil {
		lock, err = owner.Take(ctx, path, cfg.StateDir, durable.LockTime)
	}
	return lock, err
}

// withRemedy adds to the refusal of another crius's directory, which the option names, what
// to do.
func withRemedy(err error, option string) error {
	if taken := new(owner.TakenError); errors.As(err, &taken) {
		return fmt.Errorf("%w: %s", err, taken.Remedy(option))
	}
	return err
}

// openOwned opens the store of an owner; without one it is only looked at.
func openOwned(ctx context.Context, cfg Options, options types.StoreOptions, manifest *durable.Manifest, lock owners) (_ *Store, err error) {
	roots := rootsOf(options)
	before := durable.NewLocks(roots)
	if err := errors.Join(before.Await(ctx, durable.ToWrite), before.Close()); err != nil {
		return nil, fmt.Errorf("open image store %s: %w", options.GraphRoot, err)
	}
	if cfg.ReadOnly {
		err = durable.RecordsIntact(roots)
	} else {
		err = manifest.Restore()
	}
	if err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	var lib cstorage.Store
	var locks *durable.Locks
	err = trace.Call(ctx, "open containers/storage", func() (err error) {
		lib, locks, err = openLibrary(options, cfg.ReadOnly)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open image store %s: %w", options.GraphRoot, err)
	}
	mountOptions, err := cstorage.GetMountOptions(driverName, options.GraphDriverOptions)
	if err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	s := &Store{cfg: cfg, store: lib, roots: roots, locks: locks, mountOptions: mountOptions, manifest: manifest, reserve: reserve.In(roots.ForImages())}
	s.unwatch = panics.Watch(locks.Panicked)
	s.containersDir = cmp.Or(cfg.containersDir(), lib.GraphRoot())
	s.projects = cfg.projects()
	s.policies = trust.NewPolicies(cfg.SignaturePolicy, cfg.SignaturePolicyDir)
	s.device = sync.OnceValue(func() string { return deviceOf(s.containersDir) })
	s.leftovers = durable.NewLeftovers(lib, locks)
	s.downloads = download.In(cmp.Or(cfg.TemporaryDir, roots.ForImages()))
	s.downloads.Connections = cfg.PullConnections
	s.holds = newHolds(lib, locks, s.leftovers, lock)
	s.Foreign = &foreign.Containers{Store: lib, Locks: locks, Own: isHold, Owned: s.holds.owned}
	s.images = newCatalog(lib, locks, pinPatterns(cfg.PinnedImages), s.holds.hides)
	s.artifacts, err = openArtifacts(ctx, s)
	s.puller = s.newPuller(options)
	if err == nil && cfg.Unpacker != "" {
		s.puller.Program, err = unpack.OpenProgram(cfg.Unpacker)
	}
	if err == nil && !cfg.ReadOnly {
		err = trace.Do(ctx, "post-crash check", func(ctx context.Context) error { return manifest.Check(ctx, lib) })
	}
	if err == nil {
		err = s.holds.restore()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open image store %s: %w", options.GraphRoot, err), s.Close(ctx))
	}
	if cfg.ReadOnly {
		return s, nil
	}
	if err := s.leftovers.Recover(ctx); err != nil { // on a full disk, say, which is no reason not to start
		slog.Warn("cannot remove leftovers of unfinished pulls; the next start retries", "err", err)
	}
	if err := s.projects.Sweep(); err != nil {
		slog.Warn("cannot return project quotas of removed containers; the next start retries", "err", err)
	}
	if err := s.downloads.DeleteElsewhere(roots.All()); err != nil {
		slog.Warn("cannot delete unfinished downloads of an earlier configuration; the next start retries", "err", err)
	}
	s.downloads.Sweep()
	if err := s.artifacts.SettleNames(ctx, lib); err != nil {
		slog.Warn("cannot take names from images and OCI artifacts that share them; the next start retries", "err", err)
	}
	if err := errors.Join(registry.RemoveUsedAuthFiles(s.cfg.NamespacedAuthDir), hosts.RemoveDirs(s.store.RunRoot())); err != nil {
		slog.Warn("cannot remove credentials and registry configuration of unfinished pulls; the next start retries", "err", err)
	}
	if err := trace.Do(ctx, "write store manifest", manifest.Begin); err != nil {
		slog.Warn("cannot write the store manifest: the next boot re-verifies all images", "err", err)
	}
	s.reserve.Keep()
	return s, nil
}

// openLibrary opens containers/storage.
//
// The library must not probe for ID-mapped mounts, which crius makes itself. For the
// probe it forks a copy of this process. If this process is killed before the copy has
// set its parent-death signal, the copy lives on with all of its locks.
//
// After a reboot the library also tries what the kernel's overlay file system can do, for which
// the reserve is given up on a full disk. If that fails because the disk is full, the library
// may note it as a feature that the kernel lacks.
func openLibrary(options types.StoreOptions, readOnly bool) (cstorage.Store, *durable.Locks, error) {
	if err := os.Setenv("_CONTAINERS_OVERLAY_DISABLE_IDMAP", "yes"); err != nil {
		return nil, nil, err
	}
	var lib cstorage.Store
	roots := rootsOf(options)
	open := func() (err error) {
		if !readOnly {
			_ = os.Remove(filepath.Join(options.RunRoot, driverName, "overlay-false"))
		}
		lib, err = cstorage.GetStore(options)
		if err != nil && !fault.DiskFull(err) && slices.ContainsFunc(roots.All(), reserve.Full) { // it leaves errors out
			err = fmt.Errorf("%w: %w", err, unix.ENOSPC)
		}
		return err
	}
	var err error
	if readOnly {
		err = open()
	} else {
		err = reserve.In(roots.ForImages()).Spend(open)
	}
	if err != nil {
		return nil, nil, err
	}
	if !readOnly { // the library reads no layer before it has deleted incomplete ones
		_ = reserve.In(roots.ForImages()).Spend(func() error { _, err := lib.Layers(); return err })
	}
	return lib, durable.NewLocks(durable.RootsOf(lib)), nil
}

// Close gives back what the process holds of the store, after the last call of
// another method has returned, also when ctx is over. Mounted root file systems
// stay mounted.
func (s *Store) Close(ctx context.Context) error {
	s.usage.closed.Store(true)
	s.background.Wait()
	s.unwatch()
	locked := s.locks.Await(context.WithoutCancel(ctx), durable.ToWrite)
	err := s.holds.close(context.WithoutCancel(ctx), locked)
	if locked == nil {
		_, shutdownErr := s.store.Shutdown(false)
		if !errors.Is(shutdownErr, cstorage.ErrLayerUsedByContainer) { // another tool's container runs
			err = errors.Join(err, shutdownErr)
		}
	}
	if err := errors.Join(err, s.artifacts.Close(), s.downloads.Close(), s.leftovers.Close(), s.locks.Close(), s.puller.Program.Close()); err != nil {
		return fmt.Errorf("close image store: %w", err)
	}
	return nil
}

// Forget removes the files that crius itself keeps in the graph root, which other tools
// share: it is for a wipe. Call it after the images are removed and right before Close,
// and nothing else in between.
func (s *Store) Forget() error {
	errs := []error{s.manifest.Remove()} // first: it would have the next start want the owner of the imagestore
	for _, root := range s.roots.All() {
		errs = append(errs, os.RemoveAll(filepath.Join(root, reserve.Name)), os.RemoveAll(filepath.Join(root, ownerName)), os.RemoveAll(artifact.In(root)))
	}
	errs = append(errs, s.leftovers.Remove(), s.downloads.Delete(), s.downloads.DeleteElsewhere(s.roots.All()))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove what crius keeps in the image store: %w", err)
	}
	return nil
}

// libraryOptions are those of storage.conf where the configuration names no
// root, and the configuration's alone where it does.
func libraryOptions(cfg Config) (types.StoreOptions, error) {
	options, err := types.LoadStoreOptions(types.LoadOptions{})
	if err != nil {
		return options, fmt.Errorf("storage.conf: %w: %w", err, fault.Precondition)
	}
	if cfg.Root != "" {
		options = types.StoreOptions{GraphRoot: cfg.Root, RunRoot: options.RunRoot}
	}
	if cfg.RunRoot != "" {
		options.RunRoot = cfg.RunRoot
	}
	paths := []*string{&options.GraphRoot, &options.RunRoot}
	if options.ImageStore = cmp.Or(cfg.ImageStore, options.ImageStore); options.ImageStore != "" {
		paths = append(paths, &options.ImageStore)
	}
	for _, path := range paths {
		if *path, err = filepath.Abs(*path); err != nil {
			return options, err
		}
		if strings.Contains(*path, ":") {
			return options, fmt.Errorf("path %s: overlay does not support colons in paths: %w", *path, fault.Invalid)
		}
	}
	if options.ImageStore == options.GraphRoot {
		return options, fmt.Errorf("imagestore %s is the graph root itself; remove image.imagestore or imagestore in storage.conf: %w", options.ImageStore, fault.Invalid)
	}
	options.GraphDriverOptions = append(options.GraphDriverOptions, cfg.Options...)
	if !slices.ContainsFunc(options.GraphDriverOptions, isSync) {
		// Without it a power cut may leave a layer that is on record and whose
		// files are empty. It costs a third of the time of a pull.
		options.GraphDriverOptions = append(options.GraphDriverOptions, driverName+".sync=filesystem")
	}
	return options, supported(&options)
}

// Roots are the directories of the store of cfg.
func Roots(cfg Config) (durable.Roots, error) {
	options, err := libraryOptions(cfg)
	return rootsOf(options), err
}

func rootsOf(options types.StoreOptions) durable.Roots {
	return durable.Roots{Graph: options.GraphRoot, Run: options.RunRoot, Images: options.ImageStore}
}

func isSync(option string) bool { return optionName(option) == "sync" }

func isSyncNone(option string) bool {
	_, value, _ := strings.Cut(option, "=")
	return isSync(option) && value == "none"
}

// optionName is the name of a driver option without the driver's.
func optionName(option string) string {
	name, _, _ := strings.Cut(option, "=")
	return strings.ToLower(name[strings.LastIndex(name, ".")+1:])
}

// supported refuses what a plain overlay mount cannot honour.
func supported(options *types.StoreOptions) error {
	if driver := options.GraphDriverName; driver != "" && driver != driverName {
		return fmt.Errorf("storage driver %q: crius needs %q; set it in storage.conf or set a separate image.root for crius: %w", driver, driverName, fault.Precondition)
	}
	options.GraphDriverName = driverName
	for _, option := range options.GraphDriverOptions {
		_, value, _ := strings.Cut(option, "=")
		name := optionName(option)
		refused := name == "mount_program" || name == "force_mask" || name == "use_composefs"
		if refused && value != "" && value != "false" {
			return fmt.Errorf("storage option %q: crius mounts layers with the kernel's overlay and cannot honour it; "+
				"remove it from storage.conf or set a separate image.root for crius: %w", option, fault.Precondition)
		}
	}
	return nil
}

// dropLayerStores leaves additional layer stores out. A layer of one is known by the digest
// of its table of contents, and not by what the image's config says of it, so that
// containers/storage gives it and its image other ids (docs/decisions/0036-stores.md).
// Layers that other tools have taken from there are used all the same.
func dropLayerStores(options *types.StoreOptions) {
	options.GraphDriverOptions = slices.DeleteFunc(options.GraphDriverOptions, func(option string) bool {
		drop := optionName(option) == "additionallayerstore"
		if drop {
			slog.Warn("additional layer stores are not searched: crius pulls all layers and verifies their digests", "option", option)
		}
		return drop
	})
}

const driverName = "overlay"

// registries returns where the node has its configuration of registries.
func (s *Store) registries() registry.Config {
	return registry.Config{RegistriesConf: s.cfg.RegistriesConf, AuthFile: s.cfg.AuthFile, RunRoot: s.store.RunRoot()}
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
