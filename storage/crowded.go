package storage

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/registry/source"
)

// Bounds of one image. Registries can serve one config under any number of names and
// manifests, and the store keeps all of them with the image.
const (
	maxImageNames     = 64       // older ones go
	maxImageManifests = 128      // more are refused
	maxImageDocuments = 32 << 20 // bytes of its manifests, signatures and config; more are refused
	maxPastNames      = 16 << 10 // all that it ever had, which containers/storage keeps; more are refused
	maxRepoDigests    = 256      // combinations of names and digests that are listed
)

// crowded refuses a manifest or a name that would be one too many for the image.
func crowded(store cstorage.Store, src *source.Image) error {
	record, err := store.Image(src.ImageID())
	if err != nil {
		return nil //nolint:nilerr // a new one
	}
	manifests, bytes := 0, int64(0)
	for name, size := range record.BigDataSizes {
		bytes += size
		if strings.HasPrefix(name, cstorage.ImageDigestManifestBigDataNamePrefix+"-") {
			manifests++
		}
	}
	for _, m := range src.Manifests {
		if !slices.Contains(record.Digests, digest.FromBytes(m.Content)) {
			manifests++
			bytes += int64(len(m.Content))
		}
	}
	for _, blob := range src.Signatures {
		bytes += int64(len(blob))
	}
	if name := src.Name.String(); len(record.NamesHistory) >= maxPastNames && !slices.Contains(record.NamesHistory, name) {
		return fmt.Errorf("image %s has had %d names; remove the containers that use it and the image, and pull it again: %w", record.ID, len(record.NamesHistory), fault.Precondition)
	}
	if manifests > maxImageManifests || bytes > maxImageDocuments {
		return fmt.Errorf("image %s is stored with too many manifests and signatures: %d manifests, of at most %d, and %d bytes, of at most %d; remove the containers that use it and the image, and pull it again: %w",
			record.ID, manifests, maxImageManifests, bytes, maxImageDocuments, fault.Precondition)
	}
	return nil
}

// dropOldNames leaves an image its newest names.
func dropOldNames(ctx context.Context, store cstorage.Store, id string) {
	record, err := store.Image(id)
	if err != nil || len(record.Names) <= maxImageNames {
		return
	}
	old := record.Names[maxImageNames:] // the library puts new ones in front
	err = trace.Call(ctx, "remove old names of image", func() error { return store.RemoveNames(id, old) })
	if err != nil {
		slog.WarnContext(ctx, "cannot remove old names of image", "image", id, "err", err)
		return
	}
	slog.InfoContext(ctx, "image has too many names, oldest removed", "image", id, "names", old)
}
