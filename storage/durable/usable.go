package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

var (
	// ErrLayersLost says that a layer of an image no longer has a record or a directory.
	ErrLayersLost = errors.New("layers are missing")
	// ErrLayersLooped says that a layer of an image is its own ancestor.
	ErrLayersLooped = errors.New("damaged records of layers")
	// ErrDocumentsLost says that a manifest or the config of an image is missing or damaged.
	ErrDocumentsLost = errors.New("its manifest or config is damaged")
)

// UsableLayers returns the directories of the layer top and of all layers below it, top first. All
// of them exist and can be mounted as they are. The error is ErrLayersLost if one does not exist.
func UsableLayers(store cstorage.Store, top string) ([]string, error) {
	if top == "" {
		return nil, nil
	}
	if _, err := recordOf(store, top); err != nil {
		return nil, err
	}
	return usableDirs(store, top)
}

// RecordedLayers is UsableLayers for layers that all must have records. The error is also
// ErrLayersLooped.
func RecordedLayers(store cstorage.Store, top string) ([]string, error) {
	if top == "" {
		return nil, nil
	}
	seen := map[string]bool{}
	for id := top; id != ""; {
		if seen[id] {
			return nil, fmt.Errorf("%w: layer %s is its own ancestor; restart crius, which restores the last records without such a loop", ErrLayersLooped, id)
		}
		seen[id] = true
		layer, err := recordOf(store, id)
		if err != nil {
			return nil, err
		}
		id = layer.Parent
	}
	return usableDirs(store, top)
}

// chain yields a layer and all layers below it, top first, and each of them once: damaged records
// can have a layer below itself. The parent of the lowest one is empty.
func chain(top string, parent func(id string) string) iter.Seq[string] {
	return func(yield func(string) bool) {
		seen := map[string]bool{}
		for id := top; id != "" && !seen[id] && yield(id); id = parent(id) {
			seen[id] = true
		}
	}
}

func recordOf(store cstorage.Store, id string) (*cstorage.Layer, error) {
	layer, err := store.Layer(id)
	if errors.Is(err, cstorage.ErrLayerUnknown) {
		return nil, fmt.Errorf("%w: layer %s has no record", ErrLayersLost, id)
	}
	return layer, err
}

// usableDirs returns the directories of a layer and of all layers below it.
func usableDirs(store cstorage.Store, top string) ([]string, error) {
	dirs, err := LayerDirs(store, top)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrLayersLost, err)
	} else if err != nil {
		return nil, err
	}
	for i, dir := range dirs {
		info, err := os.Lstat(dir)
		if err == nil && info.Mode().Type() == fs.ModeSymlink { // into an additional layer store
			dirs[i], err = filepath.EvalSymlinks(dir)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: %w", ErrLayersLost, err)
		} else if err != nil {
			return nil, err
		}
		composefs := filepath.Join(filepath.Dir(dir), "composefs-data")
		if _, err := os.Lstat(composefs); err == nil {
			return nil, fmt.Errorf("layer %s is stored as composefs; remove the image and pull it again without use_composefs: %w", filepath.Dir(dir), fault.Precondition)
		}
	}
	return dirs, nil
}

// ImageUsable says why an image cannot be mounted: it has no record, or the error is that of
// RecordedLayers.
func ImageUsable(store cstorage.Store, image string) error {
	record, err := store.Image(image)
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return fmt.Errorf("image %s has no record", image)
	}
	if err == nil {
		_, err = RecordedLayers(store, record.TopLayer)
	}
	return err
}

// ImageDamage says what an image lacks: the error is that of ImageUsable, or says which of its
// manifests and its config is missing or has another digest. Whatever only keeps them from being
// read is no damage.
func ImageDamage(store cstorage.Store, image *cstorage.Image) error {
	if err := ImageUsable(store, image.ID); err != nil {
		return err
	}
	if err := errors.Join(documents(store, image)...); certain(err) {
		return fmt.Errorf("%w: %w", ErrDocumentsLost, err)
	}
	if NeverWhole(image) {
		return fmt.Errorf("%w: the program that made the image ended before it had written the manifest", ErrDocumentsLost)
	}
	return nil
}

// NeverWhole reports whether an image has no manifest on record: the library writes the record first,
// then the config and last the manifest.
func NeverWhole(image *cstorage.Image) bool {
	return !slices.Contains(image.BigDataNames, cstorage.ImageDigestBigDataKey)
}
