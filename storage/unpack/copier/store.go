package copier

import (
	"io"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/unpack/layers"
)

// checked is a store for containers/image, which takes the content of layers out of the store
// to add it elsewhere, without comparing it with its digest.
type checked struct {
	cstorage.Store
	fetched bool // no layer is found by its content, so that all are fetched
}

// Diff implements cstorage.Store. An error of what it returns is layers.ErrNotRebuilt.
func (s checked) Diff(_, to string, _ *cstorage.DiffOptions) (io.ReadCloser, error) {
	layer, err := s.Layer(to)
	if err != nil {
		return nil, err
	}
	return layers.Recall(s.Store, layer), nil
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
