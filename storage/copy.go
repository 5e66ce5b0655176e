package storage

import (
	"context"
	"errors"
	"log/slog"

	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/unpack"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// copy brings the image into the store and returns its id. It leaves foreign layers
// to a worker process as in p, and adds the image itself: one whose layers are present needs
// no worker. The worker copies the image as a whole where only containers/image knows the
// format of a layer, or a layer that is present came from another blob.
func (s *Store) copy(ctx context.Context, src *source.Image, job *durable.Job, p unpack.Task) (string, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := progress.New(&s.pulls, src.Name.String(), s.cfg.ProgressTimeout, s.cfg.MinPullRate, src.Asked, cancel)
	watch.Waited = src.Waited
	watch.Start(ctx)
	defer watch.Stop()
	end := s.keepSignatures(ctx, src)
	id, err := s.copyPresent(ctx, src, job, watch.Events)
	if errors.Is(err, source.ErrLayerWanted) {
		p.Events = watch.Events
		id, err = s.copyForeign(ctx, src, job, p)
	}
	end()
	return id, progress.CauseOf(ctx, err)
}

// keepSignatures adds to the image's signatures those that are stored with it. The
// result must be called after the copy.
func (s *Store) keepSignatures(ctx context.Context, src *source.Image) (end func()) {
	if src.ConfigDigest == "" { // its id is not known
		return func() {}
	}
	id := src.ConfigDigest.Encoded()
	src.Signatures = s.signatures.Begin(ctx, id, src.Manifest(), src.Signatures)
	return func() {
		ctx := context.WithoutCancel(ctx)
		err := s.locks.Usable()
		if err == nil {
			err = s.signatures.End(ctx, id)
		}
		if err != nil {
			slog.WarnContext(ctx, "cannot restore the signatures that the image had before the pull; pull it again from the registry that has them", "image", id, "err", err)
		}
	}
}

// copyPresent notes the image, or names, manifests and signatures of one that is there
// already, if nothing has to be unpacked for it.
func (s *Store) copyPresent(ctx context.Context, src *source.Image, job *durable.Job, events chan types.ProgressProperties) (string, error) {
	if !layers.Present(s.store, src.Layers()) {
		return "", source.ErrLayerWanted
	}
	src.PresentOnly = true
	defer func() { src.PresentOnly = false }()
	sys := s.registries().Context()
	sys.BigFilesTemporaryDir = job.Temporary
	return source.Copy(ctx, source.PresentOnly{Store: s.store}, src.Name, src.Opened(), sys, copy.Options{Progress: events})
}

// copyForeign has a worker unpack the image's layers, and copy the image if need be.
func (s *Store) copyForeign(ctx context.Context, src *source.Image, job *durable.Job, p unpack.Task) (id string, err error) {
	if err := s.features.Find(ctx, s.options); err != nil {
		return "", err
	}
	p.Source, p.Store, p.Job, p.Temporary, p.Parallel = src, s.options, job.Lock, job.Temporary, s.cfg.ParallelLayers
	p.RepeatRoom, p.Cgroups, p.Program = s.repeatRoom, s.cfg.PullCgroups, s.unpacker
	p.Writable = []string{s.store.GraphRoot(), s.store.RunRoot(), job.Temporary}
	if s.options.ImageStore != "" {
		p.Writable = append(p.Writable, s.options.ImageStore)
	}
	p.Downloads = s.downloads.Begin(reference.Domain(src.Name))
	defer func() { p.Downloads.End(err) }()
	if all := src.Layers(); p.Program == nil || len(all) == 0 || layers.Present(s.store, all) {
		return p.Copy(ctx)
	}
	if err := p.Unpack(ctx); err != nil {
		return "", err
	}
	if !layers.Present(s.store, src.Layers()) { // somebody has removed some meanwhile
		return "", cstorage.ErrLayerUnknown
	}
	id, err = s.copyPresent(ctx, src, job, p.Events)
	if errors.Is(err, source.ErrLayerWanted) {
		id, err = p.Copy(ctx)
	}
	return id, err
}
