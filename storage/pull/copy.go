package pull

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

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
	"github.com/crius-run/crius/storage/unpack/layerstore"
)

// incoming is an image that is being pulled.
type incoming struct {
	*source.Image
	job   *durable.Job
	isNew bool // the store has not got it
}

// copy brings the image into the store and returns its id. A worker unpacks foreign layers, as in
// the task t, and this process adds the image: an image whose layers are present needs no worker.
// The worker copies the image as a whole if only containers/image knows the format of a layer, or
// a layer that is present came from another blob.
func (p *Puller) copy(ctx context.Context, src incoming, t unpack.Task) (string, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := progress.New(p.Counts, src.Name.String(), p.Settings.Load().ProgressTimeout, p.Settings.Load().MinPullRate, src.Asked, cancel)
	watch.Waited = src.Waited
	watch.Start(ctx)
	defer watch.Stop()
	end := p.keepSignatures(ctx, src.Image)
	t.Events = watch.Events
	id, err := p.copyAny(ctx, src, t)
	end()
	return id, progress.CauseOf(ctx, err)
}

// copyAny copies an image with a worker, unless the store has all that it needs.
func (p *Puller) copyAny(ctx context.Context, src incoming, t unpack.Task) (string, error) {
	present := layerstore.Present(p.Library, src.Layers())
	if len(present) > 0 {
		id, err := p.copyPresent(ctx, src, present, t.Events)
		if !errors.Is(err, source.ErrLayerWanted) {
			return id, err
		}
	}
	return p.copyByWorker(ctx, src, len(present) > 0, t)
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
		if err := p.Signatures.End(ctx, id); err != nil {
			slog.WarnContext(ctx, "cannot restore the signatures that the image had before the pull; pull it again from the registry that has them", "image", id, "err", err)
		}
	}
}

// copyPresent adds an image whose layers are present to the store, or names, manifests and signatures
// to an image that is there already. The error is source.ErrLayerWanted if something must be unpacked
// first.
func (p *Puller) copyPresent(ctx context.Context, src incoming, present []*cstorage.Layer, events chan types.ProgressProperties) (id string, err error) {
	src.PresentOnly = true
	defer func() { src.PresentOnly = false }()
	sys := p.Settings.Load().Registries.Context()
	sys.BigFilesTemporaryDir = src.job.Temporary
	store, options := &source.PresentOnly{Store: p.Library, Present: present}, copy.Options{Progress: events}
	if src.isNew {
		store.Name, store.Items = src.Name.String(), indexItems(src.Image)
	}
	if len(src.Indexes) > 0 { // the name may have the digest of one, which the library does not see
		id, err = source.CopyUnnamed(ctx, store, src.ImageID(), src.Opened(), sys, options)
	} else {
		id, err = source.Copy(ctx, store, src.Name, src.Opened(), sys, options)
	}
	if err != nil || store.Created() {
		return id, err
	}
	return id, p.addIndexes(id, src.Image)
}

// addIndexes adds the indexes that the library was not shown to the image, and its name.
func (p *Puller) addIndexes(id string, src *source.Image) error {
	if len(src.Indexes) == 0 {
		return nil
	}
	for _, item := range indexItems(src) {
		if err := p.Library.SetImageBigData(id, item.Key, item.Data, manifest.Digest); err != nil {
			return fmt.Errorf("store image index: %w", err)
		}
	}
	return p.Library.AddNames(id, []string{src.Name.String()})
}

// indexItems returns the indexes that the library was not shown, as they are stored with an image.
func indexItems(src *source.Image) (items []cstorage.ImageBigDataOption) {
	for _, index := range src.Indexes {
		d := digest.FromBytes(index.Content)
		items = append(items, cstorage.ImageBigDataOption{
			Key: cstorage.ImageDigestManifestBigDataNamePrefix + "-" + d.String(), Data: index.Content, Digest: d,
		})
	}
	return items
}

// writable returns the directories of the store. Those of all layers are named, too: the library mounts them upon
// themselves, and if podman unmounts one when it ends, nothing is above what the worker has open there.
func (p *Puller) writable() (dirs []string) {
	for _, root := range durable.RootsOf(p.Library).All() {
		dirs = append(dirs, root)
		if layers := filepath.Join(root, p.Library.GraphDriverName()); exists(layers) {
			dirs = append(dirs, layers)
		}
	}
	return append(dirs, p.Library.RunRoot())
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// copyByWorker has a worker unpack the image's layers, unless they are present, and copy the image if
// necessary.
func (p *Puller) copyByWorker(ctx context.Context, src incoming, present bool, t unpack.Task) (id string, err error) {
	t.Source, t.Library, t.Job, t.Temporary, t.Parallel = src.Image, p.Library, src.job.Lock, src.job.Temporary, p.Settings.Load().ParallelLayers
	t.Unpacking, t.RepeatRoom, t.Cgroups, t.Program = p.Settings.Load().UnpackParallel, p.RepeatRoom, p.Cgroups, p.Program
	t.Free = func(ctx context.Context) error { return p.Locks.Await(ctx, durable.ToWrite) }
	t.Downloads = p.Downloads.Begin(reference.Domain(src.Name))
	defer func() { t.Downloads.End(err) }()
	if t.Program == nil || len(src.Layers()) == 0 || present {
		return p.copyWhole(ctx, src.Image, t)
	}
	if err := t.Unpack(ctx); err != nil {
		return "", blameArchive(err, t.Downloads.Failed())
	}
	unpacked := layerstore.Present(p.Library, src.Layers())
	if len(unpacked) == 0 { // somebody has removed one meanwhile
		return "", cstorage.ErrLayerUnknown
	}
	id, err = p.copyPresent(ctx, src, unpacked, t.Events)
	if errors.Is(err, source.ErrLayerWanted) {
		id, err = p.copyWhole(ctx, src.Image, t)
	}
	return id, err
}

// copyWhole has a worker copy the image.
func (p *Puller) copyWhole(ctx context.Context, src *source.Image, t unpack.Task) (string, error) {
	t.Worker.End(ctx) // of another kind
	if err := p.features.Find(ctx, p.Options); err != nil {
		return "", err
	}
	t.Store, t.Writable = p.Options, p.writable()
	id, err := t.Copy(ctx)
	if err == nil {
		err = p.addIndexes(id, src)
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
