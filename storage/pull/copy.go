package pull

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/unpack"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// copy brings the image into the store and returns its id. A worker unpacks foreign layers, as in
// the task t, and this process adds the image: an image whose layers are present needs no worker.
// The worker copies the image as a whole if only containers/image knows the format of a layer, or
// a layer that is present came from another blob.
func (p *Puller) copy(ctx context.Context, src *source.Image, job *durable.Job, t unpack.Task) (string, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := progress.New(p.Counts, src.Name.String(), p.Settings.Load().ProgressTimeout, p.Settings.Load().MinPullRate, src.Asked, cancel)
	watch.Waited = src.Waited
	watch.Start(ctx)
	defer watch.Stop()
	end := p.keepSignatures(ctx, src)
	id, err := p.copyPresent(ctx, src, job, watch.Events)
	if errors.Is(err, source.ErrLayerWanted) {
		t.Events = watch.Events
		id, err = p.copyByWorker(ctx, src, job, t)
	}
	end()
	if err == nil {
		err = p.addIndexes(id, src)
	}
	return id, progress.CauseOf(ctx, err)
}

// keepSignatures adds the stored signatures of the image to those that come with the pull. The
// caller must call end after the copy.
func (p *Puller) keepSignatures(ctx context.Context, src *source.Image) (end func()) {
	if src.ConfigDigest == "" { // its id is unknown
		return func() {}
	}
	id := src.ConfigDigest.Encoded()
	src.Signatures = p.Signatures.Begin(ctx, id, src.Manifest(), src.Signatures)
	return func() {
		ctx := context.WithoutCancel(ctx)
		err := p.Locks.Usable()
		if err == nil {
			err = p.Signatures.End(ctx, id)
		}
		if err != nil {
			slog.WarnContext(ctx, "cannot restore the signatures that the image had before the pull; pull it again from the registry that has them", "image", id, "err", err)
		}
	}
}

// copyPresent adds the image to the store, or names, manifests and signatures to an image that
// is there already. The error is source.ErrLayerWanted if something must be unpacked first.
func (p *Puller) copyPresent(ctx context.Context, src *source.Image, job *durable.Job, events chan types.ProgressProperties) (string, error) {
	if !layers.Present(p.Library, src.Layers()) {
		return "", source.ErrLayerWanted
	}
	src.PresentOnly = true
	defer func() { src.PresentOnly = false }()
	sys := p.Settings.Load().Registries.Context()
	sys.BigFilesTemporaryDir = job.Temporary
	store, options := source.PresentOnly{Store: p.Library}, copy.Options{Progress: events}
	if len(src.Indexes) > 0 { // the name may have the digest of one, which the library does not see
		return source.CopyUnnamed(ctx, store, src.ImageID(), src.Opened(), sys, options)
	}
	return source.Copy(ctx, store, src.Name, src.Opened(), sys, options)
}

// addIndexes adds the indexes that the library was not shown to the image, and its name.
func (p *Puller) addIndexes(id string, src *source.Image) error {
	if len(src.Indexes) == 0 {
		return nil
	}
	for _, index := range src.Indexes {
		key := cstorage.ImageDigestManifestBigDataNamePrefix + "-" + digest.FromBytes(index.Content).String()
		if err := p.Library.SetImageBigData(id, key, index.Content, manifest.Digest); err != nil {
			return fmt.Errorf("store image index: %w", err)
		}
	}
	return p.Library.AddNames(id, []string{src.Name.String()})
}

// copyByWorker has a worker unpack the image's layers, and copy the image if necessary.
func (p *Puller) copyByWorker(ctx context.Context, src *source.Image, job *durable.Job, t unpack.Task) (id string, err error) {
	if err := p.features.Find(ctx, p.Options); err != nil {
		return "", err
	}
	t.Source, t.Store, t.Job, t.Temporary, t.Parallel = src, p.Options, job.Lock, job.Temporary, p.Settings.Load().ParallelLayers
	t.Unpacking, t.RepeatRoom, t.Cgroups, t.Program = p.Settings.Load().UnpackParallel, p.RepeatRoom, p.Cgroups, p.Program
	t.Writable = []string{p.Library.GraphRoot(), p.Library.RunRoot(), job.Temporary}
	if p.Options.ImageStore != "" {
		t.Writable = append(t.Writable, p.Options.ImageStore)
	}
	t.Downloads = p.Downloads.Begin(reference.Domain(src.Name))
	defer func() { t.Downloads.End(err) }()
	if all := src.Layers(); t.Program == nil || len(all) == 0 || layers.Present(p.Library, all) {
		return t.Copy(ctx)
	}
	if err := t.Unpack(ctx); err != nil {
		return "", blameArchive(err, t.Downloads.Failed())
	}
	if !layers.Present(p.Library, src.Layers()) { // somebody has removed one meanwhile
		return "", cstorage.ErrLayerUnknown
	}
	id, err = p.copyPresent(ctx, src, job, t.Events)
	if errors.Is(err, source.ErrLayerWanted) {
		id, err = t.Copy(ctx)
	}
	return id, err
}

// blameArchive says of the end of a layer that came too early that it is the archive's own, unless the
// registry has failed to send something.
func blameArchive(err error, registryFailed bool) error {
	if registryFailed || !errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, pullerror.ErrWorkerDied) {
		return err
	}
	return fmt.Errorf("%s: the archive is cut off in the image itself, which has come as its manifest names it; rebuild the image: %w", err.Error(), fault.Invalid)
}
