package source

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// PresentOnly is a store to which no layer can be added, because workers unpack. For one copy, it spares
// the store questions whose answers are known, and changes that can be one: each opens and locks
// several files, and each change writes the records of all images.
type PresentOnly struct {
	cstorage.Store
	Present []*cstorage.Layer             // the image's layers, as they are in the store; may be empty
	Name    string                        // that a new image gets at once; empty: none
	Items   []cstorage.ImageBigDataOption // that a new image with a Name gets as well

	created *cstorage.Image // with the Name
}

// Created reports whether the copy has made an image with the Name and the Items.
func (s *PresentOnly) Created() bool { return s.created != nil }

// PutLayer implements cstorage.Store.
func (*PresentOnly) PutLayer(string, string, []string, string, bool, *cstorage.LayerOptions, io.Reader) (*cstorage.Layer, int64, error) {
	return nil, 0, ErrLayerWanted
}

// Diff implements cstorage.Store. containers/image would read the content of a layer from the
// store, to add it elsewhere: long work on foreign content, with the store locked.
func (*PresentOnly) Diff(string, string, *cstorage.DiffOptions) (io.ReadCloser, error) {
	return nil, ErrLayerWanted
}

// Layer implements cstorage.Store.
func (s *PresentOnly) Layer(id string) (*cstorage.Layer, error) {
	if i := slices.IndexFunc(s.Present, func(l *cstorage.Layer) bool { return l.ID == id }); i >= 0 {
		return s.Present[i], nil
	}
	return s.Store.Layer(id)
}

// LayersByUncompressedDigest implements cstorage.Store.
func (s *PresentOnly) LayersByUncompressedDigest(d digest.Digest) ([]cstorage.Layer, error) {
	if found := s.with(func(l *cstorage.Layer) bool { return l.UncompressedDigest == d }); len(found) > 0 {
		return found, nil
	}
	if found := s.with(func(l *cstorage.Layer) bool { return l.CompressedDigest == d }); len(found) > 0 {
		return nil, cstorage.ErrLayerUnknown // what is compressed is no content of a layer
	}
	return s.Store.LayersByUncompressedDigest(d)
}

// LayersByCompressedDigest implements cstorage.Store.
func (s *PresentOnly) LayersByCompressedDigest(d digest.Digest) ([]cstorage.Layer, error) {
	if found := s.with(func(l *cstorage.Layer) bool { return l.CompressedDigest == d }); len(found) > 0 {
		return found, nil
	}
	return s.Store.LayersByCompressedDigest(d)
}

func (s *PresentOnly) with(is func(*cstorage.Layer) bool) (found []cstorage.Layer) {
	for _, l := range s.Present {
		if is(l) {
			found = append(found, *l)
		}
	}
	return found
}

// CreateImage implements cstorage.Store. A Name that another image has is moved to the new one later, as
// the library does.
func (s *PresentOnly) CreateImage(id string, names []string, layer, metadata string, options *cstorage.ImageOptions) (*cstorage.Image, error) {
	if s.Name == "" || options == nil {
		return s.Store.CreateImage(id, names, layer, metadata, options)
	}
	whole := *options
	whole.BigData = slices.Concat(options.BigData, s.Items)
	whole.NamesHistory = append(slices.Clone(options.NamesHistory), s.Name)
	created, err := s.Store.CreateImage(id, append(slices.Clone(names), s.Name), layer, metadata, &whole)
	if errors.Is(err, cstorage.ErrDuplicateName) {
		return s.Store.CreateImage(id, names, layer, metadata, options)
	}
	s.created = created
	return created, err
}

// AddNames implements cstorage.Store.
func (s *PresentOnly) AddNames(id string, names []string) error {
	if s.created != nil && s.created.ID == id && slices.Equal(s.created.Names, names) {
		return nil
	}
	return s.Store.AddNames(id, names)
}

// Image implements cstorage.Store.
func (s *PresentOnly) Image(id string) (*cstorage.Image, error) {
	if s.created != nil && s.created.ID == id {
		return s.created, nil
	}
	return s.Store.Image(id)
}

// CheckRecord refuses an image whose id the store has given to other layers, as for truncated
// images of earlier versions of crius and of other tools, or images that were built here. record
// is that of the id, or nil.
func CheckRecord(record *cstorage.Image, src *Image) error {
	wanted := src.Layers()
	if record == nil || len(wanted) == 0 || record.TopLayer == layers.Top(wanted) {
		return nil
	}
	return fmt.Errorf("image %s is stored with other layers than its config names; remove the containers that use it and the image (crictl rmi %s), and pull it again: %w",
		record.ID, record.ID, fault.Precondition)
}
