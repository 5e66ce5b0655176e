// Package layerstore adds layers that were unpacked beside containers/storage to it (package layers
// unpacks them), and says where those are that it has.
//
// The server does that itself. The process that unpacks has neither the library nor access to the store: what
// it hands over is looked at before the store has it. See docs/decisions/0083-server-adds-layers.md.
package layerstore

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// Store implements layers.Store for a store of the library. It is safe for concurrent use.
type Store struct{ cstorage.Store }

// Has implements layers.Store.
func (s Store) Has(id string) (bool, error) {
	_, err := s.Layer(id)
	return err == nil, nil
}

// Dirs implements layers.Store.
func (s Store) Dirs(id string) ([]string, error) {
	driver, err := s.GraphDriver()
	if err != nil {
		return nil, err
	}
	metadata, err := driver.Metadata(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("layer %s: %w", id, cstorage.ErrParentUnknown)
	}
	if err != nil {
		return nil, err
	}
	dirs := []string{metadata["UpperDir"]}
	if lower := metadata["LowerDir"]; lower != "" {
		dirs = append(dirs, strings.Split(lower, ":")...) // overlay takes no colon in a directory either
	}
	return dirs, nil
}

// Gone reports whether an error says that the store lacks a layer or an image.
func Gone(err error) bool {
	for _, gone := range []error{
		cstorage.ErrLayerUnknown, cstorage.ErrImageUnknown, cstorage.ErrParentUnknown,
		cstorage.ErrNotAnImage, cstorage.ErrNotALayer, cstorage.ErrNotAnID, layers.ErrGone,
	} {
		if errors.Is(err, gone) {
			return true
		}
	}
	return false
}

// Present returns the records of an image's layers, or nil unless the store has all of them, one on top
// of the other. It looks for the top layer first, which is the one that is most often missing.
func Present(store cstorage.Store, image []layers.Layer) []*cstorage.Layer {
	records := make([]*cstorage.Layer, len(image))
	for i, l := range slices.Backward(layers.NewMissing(image)) {
		var err error
		if records[i], err = store.Layer(l.ID); err != nil {
			return nil
		}
	}
	return records
}

// Missing returns the layers of an image that the store lacks, from the lowest one up.
func Missing(store cstorage.Store, image []layers.Layer) []layers.Missing {
	missing := layers.NewMissing(image)
	for len(missing) > 0 {
		if _, err := store.Layer(missing[0].ID); err != nil {
			break
		}
		missing = missing[1:]
	}
	for i := range missing {
		missing[i].Stored = madeFrom(store, missing[i].Layer)
	}
	return missing
}

// madeFrom returns a layer in the store that was made from the same blob, or nil.
func madeFrom(store cstorage.Store, l layers.Layer) *layers.Stored {
	found, err := store.LayersByCompressedDigest(l.Blob)
	if err != nil {
		return nil
	}
	for i := range found {
		if found[i].UncompressedDigest == l.DiffID {
			stored, err := Locate(store, &found[i])
			if err != nil {
				return nil
			}
			return stored
		}
	}
	return nil
}

// Locate says where a stored layer is.
func Locate(store cstorage.Store, layer *cstorage.Layer) (*layers.Stored, error) {
	driver, err := store.GraphDriver()
	if err != nil {
		return nil, err
	}
	paths, err := driver.Metadata(layer.ID)
	if err != nil {
		return nil, err
	}
	s := &layers.Stored{ID: layer.ID, BlobSize: layer.CompressedSize, Size: layer.UncompressedSize, Content: layer.UncompressedDigest}
	s.Files = paths["UpperDir"] // ROOT/overlay/ID/diff
	s.Split = findSplit(layer.ID, filepath.Join(store.GraphRoot(), store.GraphDriverName()), filepath.Dir(filepath.Dir(s.Files)))
	return s, nil
}

// findSplit finds the tar-split data of a layer: beside the records, which are in the graph root even if
// layers have an imagestore, or in an additional store. It returns "" if there are none.
func findSplit(layer string, homes ...string) string {
	for _, home := range homes {
		file := filepath.Join(home+"-layers", layer+diskusage.SplitSuffix)
		if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
			return file
		}
	}
	return ""
}

// Rebuild returns the content of a stored layer, as layers.Rebuild does.
func Rebuild(store cstorage.Store, layer *cstorage.Layer) io.ReadCloser {
	stored, err := Locate(store, layer)
	if err != nil {
		return failed{err}
	}
	return layers.Rebuild(stored.Place, stored.Size)
}

// Recall returns the content of a stored layer, as layers.Recall does.
func Recall(store cstorage.Store, layer *cstorage.Layer) io.ReadCloser {
	stored, err := Locate(store, layer)
	if err != nil {
		return failed{fmt.Errorf("layer %s in the image store %w: %w", layer.ID, layers.ErrNotRebuilt, err)}
	}
	return layers.Recall(stored)
}

// Replaced names a file of a stored layer that has been replaced, as layers.Replaced does.
func Replaced(store cstorage.Store, layer *cstorage.Layer) (name string, err error) {
	stored, err := Locate(store, layer)
	if err != nil {
		return "", err
	}
	return layers.Replaced(stored.Place)
}

// failed is a reader that has failed.
type failed struct{ error }

// Read implements io.Reader.
func (f failed) Read([]byte) (int, error) { return 0, f.error }

// Close implements io.Closer.
func (f failed) Close() error { return nil }
