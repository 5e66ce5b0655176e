package copier

import (
	"io"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/unpack/layerstore"
)

// checked is a store for containers/image, which reads the content of layers from the store to add
// it elsewhere, without comparing its digest.
type checked struct {
	cstorage.Store
	fetched bool // layers are not found by their content, so all are fetched
}

// Diff implements cstorage.Store. All errors of the reader are layers.ErrNotRebuilt.
func (s checked) Diff(_, to string, _ *cstorage.DiffOptions) (io.ReadCloser, error) {
	layer, err := s.Layer(to)
	if err != nil {
		return nil, err
	}
	return layerstore.Recall(s.Store, layer), nil
}

// LayersByCompressedDigest implements cstorage.Store.
func (s checked) LayersByCompressedDigest(d digest.Digest) ([]cstorage.Layer, error) {
	return s.found(s.Store.LayersByCompressedDigest, d)
}

// LayersByUncompressedDigest implements cstorage.Store.
func (s checked) LayersByUncompressedDigest(d digest.Digest) ([]cstorage.Layer, error) {
	return s.found(s.Store.LayersByUncompressedDigest, d)
}

// LayersByTOCDigest implements cstorage.Store.
func (s checked) LayersByTOCDigest(d digest.Digest) ([]cstorage.Layer, error) {
	return s.found(s.Store.LayersByTOCDigest, d)
}

func (s checked) found(find func(digest.Digest) ([]cstorage.Layer, error), d digest.Digest) ([]cstorage.Layer, error) {
	if s.fetched {
		return nil, cstorage.ErrLayerUnknown
	}
	return find(d)
}
