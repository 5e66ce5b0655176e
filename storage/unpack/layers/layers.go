// Package layers adds the layers of an image to containers/storage while they are being downloaded:
// it digests, decompresses and unpacks the bytes as they come.
//
// containers/image stores a blob, decompresses it to learn the digest of its content, and then
// decompresses and digests it again to unpack it. Here the content's digest is known from the
// image's config and compared before the layer gets its record, so once is enough. A copy by
// containers/image afterwards finds the layers, and adds the image.
package layers

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"
)

// Layer is one layer of an image.
type Layer struct {
	Blob   digest.Digest `json:"Blob"`   // of the layer in the registry; digest.Canonical
	Size   int64         `json:"Size"`   // of the blob, in bytes
	DiffID digest.Digest `json:"DiffID"` // of the decompressed content, from the image's config; digest.Canonical
}

// Intake adds layers to a store.
type Intake struct {
	Store    cstorage.Store
	Into     Target                       // of Store
	Dir      string                       // for layers that are copied within the store
	Parallel int                          // downloads at a time, at least 1
	Unpack   int                          // layers that are unpacked at a time, at least 1
	Fetch    func(Layer) (Arrival, error) // begins to download a blob
	Added    func(Layer)                  // called when a downloaded blob has been unpacked
	Lost     func(Layer, error)           // called when a blob is downloaded because its layer in the store cannot be rebuilt
}

// Target unpacks the layers of one image for a store.
type Target interface {
	// Stage unpacks the content of a layer beside the store. The caller must call Drop. blobs
	// returns the bytes of all blobs of the image that are missing, once they have come. Stage is
	// safe for concurrent use.
	Stage(ctx context.Context, content io.Reader, blobs func() (int64, error)) (Staged, error)
	// CheckRepeat refuses a layer that repeats too much of the layers that have been added.
	CheckRepeat(content digest.Digest) error
	// Add adds layers to the store, each above the one before it. It returns how many the store has
	// now, those that it had already included, and why it has not the next one.
	Add(ctx context.Context, layers []Addition) (added int, err error)
}

// Addition is a layer and its place in the store.
type Addition struct {
	Staged     Staged // of the same Target; nil: the store has the layer
	ID, Parent string // an empty parent: it is the lowest layer
	Record     Record
}

// Staged is a layer that has been unpacked beside the store.
type Staged interface {
	// Drop deletes what has been unpacked, unless it was added.
	Drop() error
}

// Arrival is a blob on its way into a file.
type Arrival interface {
	// Next returns how many bytes have arrived, once there are more than at the last call. When all
	// have arrived, with the size and the digest of the blob, the error is io.EOF.
	Next() (size int64, err error)
	// File returns the file after the first Next. The caller must close it.
	File() *os.File
	// Close ends the download, and a Next that waits.
	Close() error
}

// Present returns the records of an image's layers, or nil unless the store has all of them, one on top
// of the other. It looks for the top layer first, which is the one that is most often missing.
func Present(store cstorage.Store, image []Layer) []*cstorage.Layer {
	var contents []digest.Digest
	for _, l := range image {
		contents = append(contents, l.DiffID)
	}
	records := make([]*cstorage.Layer, len(image))
	for i, id := range slices.Backward(IDs(contents)) {
		var err error
		if records[i], err = store.Layer(id); err != nil {
			return nil
		}
	}
	return records
}

// Top returns the id of an image's top layer, or "" if it has none.
func Top(image []Layer) (id string) {
	for _, l := range image {
		id = layerID(id, l.DiffID)
	}
	return id
}

// IDs returns the ids of layers with these contents, one on top of the other.
func IDs(contents []digest.Digest) (ids []string) {
	id := ""
	for _, content := range contents {
		id = layerID(id, content)
		ids = append(ids, id)
	}
	return ids
}

// step is a layer that must be added.
type step struct {
	Layer
	id, parent string
	present    bool  // its content is in the store, or will be after an earlier step
	like       *step // the earlier step, or one with the same content
	stored     int64 // bytes of the blob from which the stored layer was made
	blob       *spool

	ready  chan struct{} // closed when staged and err are valid
	staged Staged        // nil: the store has the layer already
	err    error
	added  chan struct{} // closed when the layer is in the store
}

// plan finds the layers that the store lacks.
func (in *Intake) plan(image []Layer) (steps []*step) {
	blobs, contents := map[digest.Digest]*step{}, map[digest.Digest]*step{}
	parent := ""
	for _, l := range image {
		s := in.newStep(l, parent)
		parent = s.id
		if len(steps) == 0 {
			if _, err := in.Store.Layer(s.id); err == nil {
				continue
			}
		}
		source, err := in.source(l)
		switch {
		case err == nil:
			s.stored = source.CompressedSize
		case blobs[l.Blob] != nil:
			s.stored = blobs[l.Blob].Size
		}
		s.present = err == nil || blobs[l.Blob] != nil
		s.like = contents[l.DiffID]
		blobs[l.Blob], contents[l.DiffID] = s, s
		steps = append(steps, s)
	}
	return steps
}

func (in *Intake) newStep(l Layer, parent string) *step {
	return &step{
		Layer: l, id: layerID(parent, l.DiffID), parent: parent, blob: newSpool(in.Dir),
		ready: make(chan struct{}), added: make(chan struct{}),
	}
}

// layerID returns the id of a layer with this content, as containers/image computes it.
func layerID(parent string, content digest.Digest) string {
	if parent == "" {
		return content.Encoded()
	}
	return digest.Canonical.FromString(parent + "+" + content.Encoded()).Encoded()
}

// source returns a layer in the store that was made from the same blob.
func (in *Intake) source(l Layer) (*cstorage.Layer, error) {
	found, err := in.Store.LayersByCompressedDigest(l.Blob)
	if err != nil {
		return nil, err
	}
	for _, layer := range found {
		if layer.UncompressedDigest == l.DiffID {
			return &layer, nil
		}
	}
	return nil, cstorage.ErrLayerUnknown
}

// fetch downloads a blob.
func (in *Intake) fetch(ctx context.Context, s *step) error {
	blob, err := in.Fetch(s.Layer)
	if err != nil {
		return err
	}
	defer func() { _ = blob.Close() }()
	defer context.AfterFunc(ctx, func() { _ = blob.Close() })()
	for shown := false; ; shown = true {
		size, err := blob.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := s.blob.show(blob.File(), size); err != nil {
			if !shown {
				_ = blob.File().Close() // nobody will read it
			}
			return err
		}
	}
}

// swept reports whether the directory into which a layer was unpacked may have been deleted
// meanwhile. A server that starts deletes staging directories that are not locked, and one that is just being
// created looks like that; other programs may delete all that they do not know.
//
// If the server has that lock just then, the owner does not get it.
func swept(err error) bool {
	return (errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES)) && !errors.Is(err, ErrNotRebuilt)
}

// recall writes the content of a stored layer, which is unpacked only after it was found to be
// whole.
func (in *Intake) recall(layer *cstorage.Layer, to *spool) error {
	from := Recall(in.Store, layer)
	_, err := io.Copy(to, from)
	if err := errors.Join(err, from.Close()); err != nil {
		return err
	}
	to.end(nil)
	return nil
}
