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
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"

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
	Dir      string                       // for layers that are copied within the store
	Parallel int                          // downloads at a time, at least 1
	Fetch    func(Layer) (Arrival, error) // begins to download a blob
	Added    func(Layer)                  // called when a downloaded blob has been unpacked
	Lost     func(Layer, error)           // called when a blob is downloaded because its layer in the store cannot be rebuilt
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

// Put adds the missing layers of an image to the store, from the lowest one up. It downloads
// several at a time, and unpacks one after the other. A layer is added only if its blob and its
// content have their digests. Layers that were added before an error stay. If the store has the
// content of a layer elsewhere, the layer is rebuilt from there or, if that fails, downloaded.
//
// A layer that the store has under its id is not downloaded. Whether the image may use it,
// containers/image checks by the digest of the blob.
func (in *Intake) Put(ctx context.Context, image []Layer) error {
	steps := in.plan(image)
	ctx, cancel := context.WithCancel(ctx)
	turns := make(chan struct{}, in.Parallel)
	var downloads sync.WaitGroup
	defer downloads.Wait()
	defer cancel()
	download := func(steps ...*step) { downloads.Go(func() { in.download(ctx, steps, turns, &downloads) }) }
	download(steps...)
	for _, s := range steps {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err := in.add(s)
		if s.present && errors.Is(err, ErrNotRebuilt) {
			if in.Lost != nil {
				in.Lost(s.Layer, err)
			}
			s = &step{Layer: s.Layer, id: s.id, parent: s.parent, blob: newSpool(in.Dir)}
			download(s)
			err = in.add(s)
		}
		if err != nil {
			return fmt.Errorf("layer %s: %w", s.Blob, err)
		}
	}
	return nil
}

// Present reports whether the store has all layers of an image, one on top of the other.
func Present(store cstorage.Store, image []Layer) bool {
	parent := ""
	for _, l := range image {
		parent = layerID(parent, l.DiffID)
		if _, err := store.Layer(parent); err != nil {
			return false
		}
	}
	return len(image) > 0
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
	present    bool // its content is in the store, or will be after an earlier step
	blob       *spool
}

// plan finds the layers that the store lacks.
func (in *Intake) plan(image []Layer) (steps []*step) {
	coming := map[digest.Digest]bool{}
	parent := ""
	for _, l := range image {
		id := layerID(parent, l.DiffID)
		s := &step{Layer: l, id: id, parent: parent, blob: newSpool(in.Dir)}
		parent = id
		if len(steps) == 0 {
			if _, err := in.Store.Layer(id); err == nil {
				continue
			}
		}
		_, err := in.source(l)
		s.present = err == nil || coming[l.Blob]
		coming[l.Blob] = true
		steps = append(steps, s)
	}
	return steps
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

// download downloads the blobs that are not present, in their order, and as many at a time as turns
// has room for.
func (in *Intake) download(ctx context.Context, steps []*step, turns chan struct{}, downloads *sync.WaitGroup) {
	for _, s := range steps {
		if s.present {
			continue
		}
		select {
		case turns <- struct{}{}:
		case <-ctx.Done():
			s.blob.end(context.Cause(ctx))
			continue
		}
		downloads.Go(func() {
			defer func() { <-turns }()
			s.blob.end(in.fetch(ctx, s))
		})
	}
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

// add unpacks a layer while its blob arrives.
func (in *Intake) add(s *step) error {
	defer s.blob.close()
	size := s.Size
	if s.present {
		source, err := in.source(s.Layer)
		if err != nil { // somebody has removed it
			return fmt.Errorf("layer with this content in the image store %w: %w", ErrNotRebuilt, err)
		}
		size = source.CompressedSize
		if err := in.recall(source, s.blob); err != nil {
			return err
		}
	}
	const attempts = 3
	for attempt := 1; ; attempt++ {
		err := in.unpack(s, size)
		if err == nil {
			break
		}
		if attempt == attempts || !swept(err) {
			return err
		}
	}
	if !s.present && in.Added != nil {
		in.Added(s.Layer)
	}
	return nil
}

// unpack unpacks a layer whose blob has size bytes. It can be called again.
func (in *Intake) unpack(s *step, size int64) error {
	c, err := s.open()
	if err != nil {
		return err
	}
	defer c.Close()
	_, _, err = in.Store.PutLayer(s.id, s.parent, nil, "", false, &cstorage.LayerOptions{
		OriginalDigest: s.Blob, OriginalSize: &size, UncompressedDigest: s.DiffID,
	}, c)
	switch {
	case errors.Is(err, cstorage.ErrDuplicateID): // another pull was faster
		return nil
	case c.err != nil: // the library has only the child's word for it
		return c.err
	case err != nil:
		return err
	case !c.checked:
		return errors.Join(errors.New("the image store did not read it to its end"), in.Store.DeleteLayer(s.id))
	}
	return nil
}

// swept reports whether the directory into which a layer was unpacked may have been deleted
// meanwhile. Every process that opens the store deletes staging directories whose lock file is not
// locked. A directory that is just being created looks like that to a second process; after the
// second has deleted the lock file, the owner's lock does not protect against a third. The
// unpacking child reports this only as text.
func swept(err error) bool {
	return errors.Is(err, fs.ErrNotExist) ||
		strings.Contains(err.Error(), "unpacking failed") && strings.Contains(err.Error(), unix.ENOENT.Error())
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
