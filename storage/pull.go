package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/pull"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/trust"
)

// ErrSignature says that the signature policy does not accept the image. It comes
// together with fault.Denied, and distinguishes this refusal from a registry's.
var ErrSignature = trust.ErrSignature

// ErrWorkerDied says that the process that unpacks the image has died. It comes together with
// fault.Unavailable, and distinguishes that from a registry that is not available.
var ErrWorkerDied = pullerror.ErrWorkerDied

// PullRequest says what to pull and for whom.
type PullRequest = pull.Request

// repeatRoom is enough for the repeated layers of small images, however many.
const repeatRoom = 256 << 20 // bytes

// newPuller returns the store's Puller. The caller opens its Program.
func (s *Store) newPuller(options types.StoreOptions) *pull.Puller {
	p := &pull.Puller{
		Library:      s.store,
		Options:      options,
		Locks:        s.locks,
		Leftovers:    s.leftovers,
		Manifest:     s.manifest,
		Artifacts:    s.artifacts.Store,
		Downloads:    s.downloads,
		Policies:     s.policies,
		Verifiers:    s.verifiers,
		Signatures:   &trust.Stored{Store: s.store, Usable: s.locks.Usable},
		Counts:       &s.pulls,
		Cgroups:      s.cfg.PullCgroups,
		Owned:        s.holds.owned,
		DropLost:     s.dropLost,
		Known:        func(name string) bool { return s.images.hasName(name) || s.artifacts.HasName(name) },
		RepeatRoom:   repeatRoom,
		Records:      pull.RecordRoom{Most: pull.MaxRecords},
		LargeWindows: make(chan struct{}, 1),
	}
	p.Settings.Store(s.pullSettings())
	return p
}

// pullSettings returns what pulls that begin now work by.
func (s *Store) pullSettings() *pull.Settings {
	cfg := s.now()
	return &pull.Settings{
		Registries:        s.registries(),
		HostsDirs:         cfg.HostsDirs,
		NamespacedAuthDir: cfg.NamespacedAuthDir,
		DecryptionKeys:    cfg.DecryptionKeysPath,
		TemporaryDir:      cfg.TemporaryDir,
		ParallelLayers:    cfg.ParallelLayers,
		UnpackParallel:    cmp.Or(cfg.UnpackParallel, min(max(runtime.GOMAXPROCS(0), 2), 8)),
		ProgressTimeout:   cfg.ProgressTimeout,
		MinPullRate:       cfg.MinPullRate,
		PullTimeout:       cfg.PullTimeout,
	}
}

// Pull fetches an image or an OCI artifact and returns it. An image that the store has with the
// same digest is not fetched again. registries.conf and the signature policy are read at every
// pull.
//
// The error says fault.NotFound, Unauthenticated, Denied (a policy, a block or the registry;
// ErrSignature if it was the signature policy), Unavailable, Timeout, Exhausted (disk full),
// Invalid (the request, or an image that no retry will make good) or Precondition (the node's
// configuration); its text never contains credentials. A pull that fails or whose ctx ends leaves
// nothing in the store; its downloads are kept for a while, for the next pull. After a pull that
// succeeds the image survives a power cut.
func (s *Store) Pull(ctx context.Context, req PullRequest) (image *Image, err error) {
	err = s.puller.Pull(ctx, req, func(ctx context.Context, got pull.Result) error {
		image, err = s.take(ctx, got)
		return err
	})
	if err != nil {
		return nil, err
	}
	return image, nil
}

// take returns the image or artifact that a pull has brought.
func (s *Store) take(ctx context.Context, got pull.Result) (*Image, error) {
	if got.Artifact != nil {
		return s.artifacts.image(got.Artifact), nil
	}
	id := got.Image
	image, err := s.images.find(ctx, id)
	if err != nil || image != nil {
		return image, err
	}
	if err := durable.ImageUsable(s.store, id); errors.Is(err, durable.ErrLayersLooped) {
		return nil, fmt.Errorf("image %s: %w: %w", id, err, fault.Precondition)
	}
	return nil, fmt.Errorf("image %s: %w: it was removed as soon as it was pulled", id, cstorage.ErrImageUnknown)
}

// Pulls returns counts of the pulls since the store was opened, and the pulls in progress.
func (s *Store) Pulls() *progress.Counts { return &s.pulls }
