package source

import (
	"fmt"
	"io"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// PresentOnly is a store to which no layer can be added, because workers unpack.
type PresentOnly struct{ cstorage.Store }

// PutLayer implements cstorage.Store.
func (PresentOnly) PutLayer(string, string, []string, string, bool, *cstorage.LayerOptions, io.Reader) (*cstorage.Layer, int64, error) {
	return nil, 0, ErrLayerWanted
}

// Diff implements cstorage.Store. containers/image would read the content of a layer from the
// store, to add it elsewhere: long work on foreign content, with the store locked.
func (PresentOnly) Diff(string, string, *cstorage.DiffOptions) (io.ReadCloser, error) {
	return nil, ErrLayerWanted
}

// CheckRecord refuses an image whose id the store has given to other layers, as for truncated
// images of earlier versions of crius and of other tools, or images that were built here.
func CheckRecord(store cstorage.Store, src *Image) error {
	wanted := src.Layers()
	record, err := store.Image(src.ImageID())
	if err != nil || len(wanted) == 0 || record.TopLayer == layers.Top(wanted) {
		return nil //nolint:nilerr // a new one
	}
	return fmt.Errorf("image %s is stored with other layers than its config names; remove the containers that use it and the image (crictl rmi %s), and pull it again: %w",
		record.ID, record.ID, fault.Precondition)
}
