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
	"go.podman.io/storage/types"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/owner"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/foreign"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/registry/verifier"
	"github.com/crius-run/crius/storage/reserve"
	"github.com/crius-run/crius/storage/unpack"
)

// Open opens the store, and creates it if it does not exist. After a reboot it looks for damage by
// a power cut: it moves damaged records of containers/storage aside, and deletes damaged images,
// which are then pulled again. Other images stay.
//
// A store has one owner, the crius of cfg.StateDir, until Close and for as long as that crius has
// pods or containers on record. Another crius is refused with an *owner.TakenError.
func Open(ctx context.Context, cfg Options) (*Store, error) {
	options, err := cfg.library()
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
		option := optionOf(root, options)
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

// CheckOwner returns the *owner.TakenError with which Open would fail now, and creates nothing. The process
// must not have the store open.
func CheckOwner(cfg Options) error {
	options, err := cfg.library()
	if err != nil {
		return nil //nolint:nilerr // Open reports it
	}
	for _, root := range rootsOf(options).All() {
		if err := owner.Look(filepath.Join(root, ownerName), cfg.StateDir); err != nil {
			return fmt.Errorf("open image store %s: %w", root, withRemedy(err, optionOf(root, options)))
		}
	}
	return nil
}

// optionOf returns the option that names a directory of the store.
func optionOf(root string, options types.StoreOptions) string {
	if root == options.ImageStore {
		return "image.imagestore"
	}
	return "image.root"
}

// owners are the locks on a store's directories.
type owners []owned

type owned struct {
	*owner.Lock
	dir, option string
}

// Close releases all directories. It may be called again.
func (o owners) Close() error {
	var errs []error
	for _, lock := range o {
		errs = append(errs, lock.Close())
	}
	return errors.Join(errs...)
}

// Lost returns an error if another crius has become the owner of one of the directories.
func (o owners) Lost() error {
	for _, lock := range o {
		if err := lock.Lost(); err != nil {
			return fmt.Errorf("image store %s: %w", lock.dir, withRemedy(err, lock.option))
		}
	}
	return nil
}

// own takes ownership of the directory root for cfg.StateDir. With ReadOnly it only reports
// whether that would succeed.
func own(ctx context.Context, root string, cfg Options) (lock *owner.Lock, err error) {
	if path := filepath.Join(root, ownerName); cfg.ReadOnly {
		err = owner.Look(path, cfg.StateDir)
	} else if err = os.MkdirAll(root, 0o700); err == nil {
		lock, err = owner.Take(ctx, path, cfg.StateDir, durable.LockTime)
	}
	return lock, err
}

// withRemedy adds to the refusal of a directory that another crius owns what to do with the
// option that names it.
func withRemedy(err error, option string) error {
	if taken := new(owner.TakenError); errors.As(err, &taken) {
		return fmt.Errorf("%w: %s", err, taken.Remedy(option))
	}
	return err
}

// openOwned opens the store for its owner; with cfg.ReadOnly there is none.
func openOwned(ctx context.Context, cfg Options, options types.StoreOptions, manifest *durable.Manifest, lock owners) (_ *Store, err error) {
	s := &Store{cfg: cfg, roots: rootsOf(options), manifest: manifest}
	if err := s.prepareRecords(ctx); err != nil {
		return nil, err
	}
	err = trace.Call(ctx, "open containers/storage", func() (err error) {
		s.store, s.locks, err = openLibrary(options, cfg.ReadOnly)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open image store %s: %w", options.GraphRoot, err)
	}
	if s.mountOptions, err = cstorage.GetMountOptions(driverName, options.GraphDriverOptions); err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	if err := s.furnish(ctx, options, lock); err != nil {
		return nil, errors.Join(fmt.Errorf("open image store %s: %w", options.GraphRoot, err), s.Close(ctx))
	}
	if !cfg.ReadOnly {
		s.tidy(ctx)
	}
	return s, nil
}

// prepareRecords waits until no other program has the store locked, and repairs the records of
// containers/storage before the library reads them. With cfg.ReadOnly it only checks them.
func (s *Store) prepareRecords(ctx context.Context) error {
	before := durable.NewLocks(s.roots)
	err := before.Await(ctx, durable.ToWrite)
	if err == nil && !s.cfg.ReadOnly { // the library deletes layers when it reads the records
		s.settleShortNames(ctx, before)
	}
	if err := errors.Join(err, before.Close()); err != nil {
		return fmt.Errorf("open image store %s: %w", s.roots.Graph, err)
	}
	if s.cfg.ReadOnly {
		err = s.roots.RecordsIntact()
	} else {
		err = s.manifest.Restore()
	}
	if err != nil {
		return fmt.Errorf("open image store: %w", err)
	}
	return nil
}

func (s *Store) settleShortNames(ctx context.Context, locks *durable.Locks) {
	err := trace.Do(ctx, "settle short names of layers", func(ctx context.Context) error { return durable.SettleShortNames(ctx, s.roots, locks) })
	if err != nil {
		slog.Warn("cannot settle the short names of layers; the next start retries", "err", err)
	}
}

// furnish makes the parts of the store, and checks images and holds against what a crash or a power
// cut may have left of them. The caller must Close the store even if that fails.
func (s *Store) furnish(ctx context.Context, options types.StoreOptions, lock owners) error {
	cfg := s.cfg
	s.reserve = reserve.In(s.roots.ForImages())
	s.unwatch = panics.Watch(s.locks.Panicked)
	s.containersDir = cmp.Or(cfg.containersDir(), s.store.GraphRoot())
	s.projects = cfg.projects()
	s.policies = trust.NewPolicies(cfg.SignaturePolicy, cfg.SignaturePolicyDir)
	s.verifiers = &verifier.Verifiers{}
	s.verifiers.Use(cfg.VerifiersDir, cfg.VerifierTimeout)
	s.device = sync.OnceValue(func() string { return deviceOf(s.containersDir) })
	s.leftovers = durable.NewLeftovers(s.store, s.locks)
	s.downloads = download.In(cmp.Or(cfg.TemporaryDir, s.roots.ForImages()))
	s.downloads.Connections.Store(int64(cfg.PullConnections))
	s.holds = newHolds(s.store, s.locks, s.leftovers, lock)
	s.Foreign = &foreign.Containers{Store: s.store, Locks: s.locks, Own: isHold, Owned: s.holds.owned}
	s.live.Store(&cfg.Config)
	s.imageUsage = &imageUsage{roots: s.roots, temporary: cfg.TemporaryDir, readOnly: cfg.ReadOnly, stop: s.usage.stopping}
	s.images = newCatalog(s.store, s.locks, s.imageUsage, func(image *Image) bool { return pinPatterns(s.now().PinnedImages)(image) })
	err := errors.Join(s.openArtifacts(ctx), s.openProfiles(ctx))
	s.puller = s.newPuller(options)
	s.Profiles.puller = s.puller
	if err == nil && cfg.Unpacker != "" {
		s.puller.Program, err = s.openUnpacker()
	}
	if err == nil && !cfg.ReadOnly {
		err = trace.Long(ctx, "post-crash check", func(ctx context.Context) error { return s.manifest.Check(ctx, s.store) })
	}
	return err
}

// openUnpacker opens the program of pull workers. They find the store in their mount namespace, with its additional image stores, and where
// pulls have temporary files.
func (s *Store) openUnpacker() (*unpack.Program, error) {
	driver, err := s.store.GraphDriver()
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, root := range slices.Concat(s.roots.All(), driver.AdditionalImageStores()) {
		dirs = append(dirs, root, filepath.Join(root, driverName)) // the driver mounts the latter
	}
	if s.cfg.TemporaryDir != "" {
		dirs = append(dirs, s.cfg.TemporaryDir)
	}
	return unpack.OpenProgram(s.cfg.Unpacker, dirs...)
}

// tidy removes leftovers of killed servers and earlier configurations. Errors, as on a full disk,
// are only logged: the next start retries.
func (s *Store) tidy(ctx context.Context) {
	if err := s.leftovers.Recover(ctx); err != nil {
		slog.Warn("cannot remove leftovers of unfinished pulls; the next start retries", "err", err)
	}
	if err := s.projects.Sweep(); err != nil {
		slog.Warn("cannot return project quotas of removed containers; the next start retries", "err", err)
	}
	if err := s.downloads.DeleteElsewhere(s.roots.All()); err != nil {
		slog.Warn("cannot delete unfinished downloads of an earlier configuration; the next start retries", "err", err)
	}
	s.downloads.Sweep()
	if err := s.artifacts.SettleNames(ctx, s.store); err != nil {
		slog.Warn("cannot take names from images and OCI artifacts that share them; the next start retries", "err", err)
	}
	if err := errors.Join(registry.RemoveUsedAuthFiles(s.cfg.NamespacedAuthDir), hosts.RemoveDirs(s.store.RunRoot())); err != nil {
		slog.Warn("cannot remove credentials and registry configuration of unfinished pulls; the next start retries", "err", err)
	}
	if err := trace.Do(ctx, "write store manifest", s.manifest.Begin); err != nil {
		slog.Warn("cannot write the store manifest: the next boot re-verifies all images", "err", err)
	}
	s.reserve.Keep()
}

// openLibrary opens containers/storage.
//
// The library must not probe for ID-mapped mounts, which crius makes itself. For the
// probe it forks a copy of this process. If this process is killed before the copy has
// set its parent-death signal, the copy lives on with all of its locks.
//
// After a reboot the library also probes the kernel's overlay file system, which needs some of the
// disk: on a full one, of the reserve. If the probe fails because the disk is full, the library may
// note that the kernel lacks a feature.
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
		if err != nil && !fault.DiskFull(err) && slices.ContainsFunc(roots.All(), reserve.Full) { // the library drops it
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

// library returns the options of containers/storage: those of storage.conf if the
// configuration names no root, else those of the configuration alone.
func (c Config) library() (types.StoreOptions, error) {
	options, err := types.LoadStoreOptions(types.LoadOptions{})
	if err != nil {
		return options, fmt.Errorf("storage.conf: %w: %w", err, fault.Precondition)
	}
	if c.Root != "" {
		options = types.StoreOptions{GraphRoot: c.Root, RunRoot: options.RunRoot}
	}
	if c.RunRoot != "" {
		options.RunRoot = c.RunRoot
	}
	paths := []*string{&options.GraphRoot, &options.RunRoot}
	if options.ImageStore = cmp.Or(c.ImageStore, options.ImageStore); options.ImageStore != "" {
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
	options.GraphDriverOptions = append(options.GraphDriverOptions, c.Options...)
	if !slices.ContainsFunc(options.GraphDriverOptions, isSync) {
		// Without it a power cut may leave a layer on record with empty files.
		// It takes a third of the time of a pull.
		options.GraphDriverOptions = append(options.GraphDriverOptions, driverName+".sync=filesystem")
	}
	return options, supported(&options)
}

// Roots returns the directories of the store.
func (c Config) Roots() (durable.Roots, error) {
	options, err := c.library()
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

// optionName returns the name of a driver option without that of the driver.
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

// dropLayerStores removes additional layer stores from the options. Their layers are known by the
// digest of a table of contents, not by the digest in the image's config, so containers/storage
// gives such a layer and its image other ids (docs/decisions/0036-stores.md). Layers that other
// tools have taken from there are used nevertheless.
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
