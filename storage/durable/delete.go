package durable

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	cstorage "go.podman.io/storage"
)

// DeleteImage deletes an image and the layers that nothing else needs. With an imagestore the
// library looks for other images with the same layers only in the directory with the image's own
// record. So layers of images in the other directory get an empty layer on top meanwhile: the
// library deletes no layer below another.
func DeleteImage(store cstorage.Store, id string) error {
	guarded := false
	if store.ImageStore() != "" {
		shared, err := sharedLayers(store, id)
		if err != nil {
			return err
		}
		if guarded, err = guard(store, guardOf(id), shared); err != nil {
			return fmt.Errorf("keep layers of other images: %w", err)
		}
	}
	_, err := store.DeleteImage(id, true)
	if guarded {
		err = errors.Join(err, store.DeleteLayer(guardOf(id)))
	}
	return err
}

// LayersOf returns the layers that deleting an image may leave behind: its own, and the one that
// DeleteImage makes.
func LayersOf(store cstorage.Store, image *cstorage.Image) []string {
	layers := append(slices.Clone(image.MappedTopLayers), guardOf(image.ID))
	below := chain(image.TopLayer, func(id string) string {
		layer, err := store.Layer(id)
		if err != nil {
			return "" // a damaged image
		}
		return layer.Parent
	})
	return slices.AppendSeq(layers, below)
}

func guardOf(image string) string {
	sum := sha256.Sum256([]byte("crius-guard-" + image))
	return hex.EncodeToString(sum[:])
}

// sharedLayers returns the layers that the library would delete with an image although another
// image has them, top first.
func sharedLayers(store cstorage.Store, image string) (shared []string, err error) {
	condemned, err := store.DeleteImage(image, false)
	if err != nil {
		return nil, err
	}
	images, err := store.Images()
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for i := range images {
		if other := &images[i]; other.ID != image && !other.ReadOnly {
			for _, id := range LayersOf(store, other) {
				used[id] = true
			}
		}
	}
	for _, id := range condemned {
		if used[id] && !slices.Contains(shared, id) {
			shared = append(shared, id)
		}
	}
	return shared, nil
}

// guard makes an empty layer on the first of layers that exists. A missing layer needs none.
func guard(store cstorage.Store, id string, layers []string) (made bool, err error) {
	for _, layer := range layers {
		_, err := store.CreateLayer(id, layer, nil, "", false, nil)
		lost := errors.Is(err, fs.ErrNotExist) || errors.Is(err, cstorage.ErrLayerUnknown) || errors.Is(err, cstorage.ErrParentUnknown)
		if !lost {
			return err == nil, err
		}
	}
	return false, nil
}
