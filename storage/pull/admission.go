package pull

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/registry/source"
)

// Bounds of one image. Registries can serve one config under any number of names and
// manifests, and the store keeps all of them with the image.
const (
	MaxNames     = 64       // the oldest are removed
	MaxManifests = 128      // more are refused
	MaxPastNames = 16 << 10 // names that it ever had, which containers/storage keeps; more are refused
	maxDocuments = 32 << 20 // bytes of its manifests, signatures and config; more are refused
)

// admit refuses an image that would take too much of the store, and bounds what its layers may
// take while they come. record is that of the image in the store, or nil. The caller must call release
// when the pull has ended.
func (p *Puller) admit(src *source.Image, record *cstorage.Image) (release func(), err error) {
	if err := errors.Join(source.CheckRecord(record, src), crowded(record, src)); err != nil {
		return nil, err
	}
	room, err := layerRoom(p.Library)
	if err != nil {
		return nil, err
	}
	src.AllowExpansion(room)
	src.LargeWindows = p.LargeWindows
	return p.Records.reserve(p.Library, src)
}

// layerRoom returns how many bytes are free for layers.
func layerRoom(store cstorage.Store) (int64, error) {
	dir := durable.RootsOf(store).ForImages()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("image file system: %w", &os.PathError{Op: "statfs", Path: dir, Err: err})
	}
	return int64(min(st.Bavail*uint64(st.Bsize), math.MaxInt64)), nil
}

// crowded refuses a manifest or a name that would exceed the bounds of its image.
func crowded(record *cstorage.Image, src *source.Image) error {
	if record == nil {
		return nil
	}
	manifests, bytes := 0, int64(0)
	for name, size := range record.BigDataSizes {
		bytes += size
		if strings.HasPrefix(name, cstorage.ImageDigestManifestBigDataNamePrefix+"-") {
			manifests++
		}
	}
	for m := range src.All() {
		if !slices.Contains(record.Digests, digest.FromBytes(m.Content)) {
			manifests++
			bytes += int64(len(m.Content))
		}
	}
	for _, blob := range src.Signatures {
		bytes += int64(len(blob))
	}
	if name := src.Name.String(); len(record.NamesHistory) >= MaxPastNames && !slices.Contains(record.NamesHistory, name) {
		return fmt.Errorf("image %s has had %d names; remove the containers that use it and the image, and pull it again: %w", record.ID, len(record.NamesHistory), fault.Precondition)
	}
	if manifests > MaxManifests || bytes > maxDocuments {
		return fmt.Errorf("image %s is stored with too many manifests and signatures: %d manifests, of at most %d, and %d bytes, of at most %d; remove the containers that use it and the image, and pull it again: %w",
			record.ID, manifests, MaxManifests, bytes, maxDocuments, fault.Precondition)
	}
	return nil
}

// dropOldNames removes all but the newest names of an image. It returns the image's record, or nil if
// that cannot be read.
func dropOldNames(ctx context.Context, store cstorage.Store, id string) *cstorage.Image {
	record, err := store.Image(id)
	if err != nil {
		return nil
	}
	if len(record.Names) <= MaxNames {
		return record
	}
	old := record.Names[MaxNames:] // the library puts new ones in front
	err = trace.Call(ctx, "remove old names of image", func() error { return store.RemoveNames(id, old) })
	if err != nil {
		slog.WarnContext(ctx, "cannot remove old names of image", "image", id, "err", err)
		return record
	}
	slog.InfoContext(ctx, "image has too many names, oldest removed", "image", id, "names", old)
	if record, err = store.Image(id); err != nil {
		return nil
	}
	return record
}
