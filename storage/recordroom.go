package storage

import (
	"errors"
	"fmt"
	"sync"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
)

// maxRecords bounds what containers/storage keeps in the memory of the server, and in files that
// are written again with each layer and image: some 700 bytes for a layer, 5 KiB for an image.
var maxRecords = recordCount{images: 8 << 10, layers: 32 << 10}

// recordCount is a number of images and of layers.
type recordCount struct{ images, layers int }

// recordRoom has room for the records of so many images and layers.
type recordRoom struct {
	most recordCount

	mu     sync.Mutex
	coming recordCount // by pulls that are under way
}

// reserve refuses an image for whose records there is no room, with fault.Exhausted. The room
// is taken until release is called, by when the store has the records or the pull has failed.
func (r *recordRoom) reserve(store cstorage.Store, src *source.Image) (release func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	there, added, err := countRecords(store, src)
	if err != nil {
		return nil, err
	}
	images, layers := there.images+r.coming.images, there.layers+r.coming.layers
	if added.images > 0 && images+added.images > r.most.images || added.layers > 0 && layers+added.layers > r.most.layers {
		return nil, fmt.Errorf("the image store has %d images, of at most %d, and %d layers, of at most %d, and the image would add %d layers; remove images: %w",
			images, r.most.images, layers, r.most.layers, added.layers, fault.Exhausted)
	}
	r.add(added)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.add(recordCount{-added.images, -added.layers})
	}, nil
}

func (r *recordRoom) add(n recordCount) {
	r.coming.images += n.images
	r.coming.layers += n.layers
}

// countRecords counts the images and layers of the store, and those that an image adds to them.
// Those of additional stores are the administrator's.
func countRecords(store cstorage.Store, src *source.Image) (there, added recordCount, err error) {
	images, err := store.Images()
	layers, layersErr := store.Layers()
	if err := errors.Join(err, layersErr); err != nil {
		return there, added, err
	}
	added.images = 1
	for i := range images {
		if images[i].ID == src.ImageID() {
			added.images = 0
		}
		if !images[i].ReadOnly {
			there.images++
		}
	}
	known := make(map[string]bool, len(layers))
	for i := range layers {
		known[layers[i].ID] = true
		if !layers[i].ReadOnly {
			there.layers++
		}
	}
	for _, id := range src.LayerIDs() {
		if !known[id] {
			added.layers++
		}
	}
	return there, added, nil
}
