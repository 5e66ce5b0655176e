package pull

import (
	"errors"
	"fmt"
	"sync"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
)

// MaxRecords bounds the records of containers/storage, which are in the memory of the server and in
// files that are written again with each layer and image: some 700 bytes for a layer, 5 KiB for an
// image.
var MaxRecords = RecordCount{Images: 8 << 10, Layers: 32 << 10}

// RecordCount is a number of images and of layers.
type RecordCount struct{ Images, Layers int }

// RecordRoom bounds the records of images and layers in a store.
type RecordRoom struct {
	Most RecordCount

	mu     sync.Mutex
	coming RecordCount // by pulls that are under way
}

// reserve refuses an image for whose records there is no room, with fault.Exhausted. The room stays
// reserved until release is called, after the records are in the store or the pull has failed.
func (r *RecordRoom) reserve(store cstorage.Store, src *source.Image) (release func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	there, added, err := countRecords(store, src)
	if err != nil {
		return nil, err
	}
	images, layers := there.Images+r.coming.Images, there.Layers+r.coming.Layers
	if added.Images > 0 && images+added.Images > r.Most.Images || added.Layers > 0 && layers+added.Layers > r.Most.Layers {
		return nil, fmt.Errorf("the image store has %d images, of at most %d, and %d layers, of at most %d, and the image would add %d layers; remove images: %w",
			images, r.Most.Images, layers, r.Most.Layers, added.Layers, fault.Exhausted)
	}
	r.add(added)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.add(RecordCount{-added.Images, -added.Layers})
	}, nil
}

// Reserved returns the room that pulls have reserved.
func (r *RecordRoom) Reserved() RecordCount {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.coming
}

func (r *RecordRoom) add(n RecordCount) {
	r.coming.Images += n.Images
	r.coming.Layers += n.Layers
}

// countRecords counts the images and layers of the store, and those that an image would add. The
// images of additional stores do not count: they are up to the administrator.
func countRecords(store cstorage.Store, src *source.Image) (there, added RecordCount, err error) {
	images, err := store.Images()
	layers, layersErr := store.Layers()
	if err := errors.Join(err, layersErr); err != nil {
		return there, added, err
	}
	added.Images = 1
	for i := range images {
		if images[i].ID == src.ImageID() {
			added.Images = 0
		}
		if !images[i].ReadOnly {
			there.Images++
		}
	}
	known := make(map[string]bool, len(layers))
	for i := range layers {
		known[layers[i].ID] = true
		if !layers[i].ReadOnly {
			there.Layers++
		}
	}
	for _, id := range src.LayerIDs() {
		if !known[id] {
			added.Layers++
		}
	}
	return there, added, nil
}
