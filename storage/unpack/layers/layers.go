// Package layers unpacks the layers of an image for containers/storage while they are being downloaded:
// it digests, decompresses and unpacks the bytes as they come. Package layerstore adds them.
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

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// Layer is one layer of an image.
type Layer struct {
	Blob   digest.Digest `json:"Blob"`   // of the layer in the registry; digest.Canonical
	Size   int64         `json:"Size"`   // of the blob, in bytes
	DiffID digest.Digest `json:"DiffID"` // of the decompressed content, from the image's config; digest.Canonical
}

// Missing is a layer that a store lacks, and its place there.
type Missing struct {
	Layer
	ID     string  `json:"ID"`
	Parent string  `json:"Parent"` // id; empty: it is the lowest layer
	Stored *Stored `json:"Stored"` // a layer that the store has made from the same blob; nil: there is none
}

// BlobSize returns the bytes of the layer's blob. Those of a blob that is not downloaded again are what the store says,
// not what the manifest says.
func (m Missing) BlobSize() int64 {
	if m.Stored != nil {
		return m.Stored.BlobSize
	}
	return m.Size
}

// Stored is a layer in a store.
type Stored struct {
	Place
	ID       string        `json:"ID"`
	BlobSize int64         `json:"BlobSize"` // of the blob from which it was made, in bytes
	Size     int64         `json:"Size"`     // of its content, in bytes; 0: unknown
	Content  digest.Digest `json:"Content"`  // of its content; empty: unknown
}

// Place says where a layer is in a store.
type Place struct {
	Files string `json:"Files"` // directory
	Split string `json:"Split"` // file with its tar-split data, compressed
}

// ErrGone says that the store lacks what the pull has found there: somebody has removed it. Another
// pull may help.
var ErrGone = errors.New("it was removed from the image store during the pull")

// Intake adds layers to a store.
type Intake struct {
	Into     Target
	Dir      string                       // for layers that are copied within the store
	Parallel int                          // downloads at a time, at least 1
	Unpack   int                          // layers that are unpacked at a time, at least 1
	Fetch    func(Layer) (Arrival, error) // begins to download a blob
	Added    func(Layer)                  // called when a downloaded blob has been unpacked
	Lost     func(Layer, error)           // called when a blob is downloaded because its layer in the store cannot be rebuilt
}

// Target unpacks the layers of one image for a store.
type Target interface {
	// Has reports whether the store has a layer.
	Has(id string) (bool, error)
	// Stage unpacks the content of a layer beside the store. The caller must call Drop. blobs
	// returns the bytes of all blobs of the image that are missing, once they have come. Stage is
	// safe for concurrent use.
	Stage(ctx context.Context, content io.Reader, blobs func() (int64, error)) (Staged, error)
	// CheckRepeat refuses a layer that repeats too much of the layers that have been added.
	CheckRepeat(content digest.Digest) error
	// Add adds layers to the store, each above the one before it. It returns where those are that the
	// store has now, those that it had already included, and why it has not the next one.
	Add(ctx context.Context, layers []Addition) (added []Place, err error)
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

// NewMissing returns the layers of an image, from the lowest one up, with their ids.
func NewMissing(image []Layer) (all []Missing) {
	parent := ""
	for _, l := range image {
		all = append(all, Missing{Layer: l, ID: layerID(parent, l.DiffID), Parent: parent})
		parent = all[len(all)-1].ID
	}
	return all
}

// layerID returns the id of a layer with this content, as containers/image computes it.
func layerID(parent string, content digest.Digest) string {
	if parent == "" {
		return content.Encoded()
	}
	return digest.Canonical.FromString(parent + "+" + content.Encoded()).Encoded()
}

// step is a layer that must be added.
type step struct {
	Missing
	present bool  // its content is in the store, or will be after an earlier step
	like    *step // an earlier step with the same content
	twin    *step // an earlier step with the same content from the same blob
	blob    *spool

	ready  chan struct{} // closed when staged and err are valid
	staged Staged        // nil: the store has the layer already
	err    error
	added  chan struct{} // closed when the layer is in the store
	place  Place         // there
}

// plan finds out which layers need no download.
func (in *Intake) plan(missing []Missing) (steps []*step) {
	type made struct{ blob, content digest.Digest }
	twins, contents := map[made]*step{}, map[digest.Digest]*step{}
	for _, m := range missing {
		s := &step{Missing: m, blob: newSpool(in.Dir), ready: make(chan struct{}), added: make(chan struct{})}
		as := made{m.Blob, m.DiffID}
		s.like, s.twin = contents[m.DiffID], twins[as]
		s.present = m.Stored != nil || s.twin != nil
		contents[m.DiffID], twins[as] = s, s
		steps = append(steps, s)
	}
	return steps
}

// source returns the stored layer with a step's content, after the earlier steps.
func (s *step) source() *Stored {
	if s.Stored != nil {
		return s.Stored
	}
	return &Stored{Place: s.twin.place, ID: s.twin.ID, Content: s.DiffID}
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
func recall(layer *Stored, to *spool) error {
	from := Recall(layer)
	_, err := io.Copy(to, from)
	if err := errors.Join(err, from.Close()); err != nil {
		return err
	}
	to.end(nil)
	return nil
}
