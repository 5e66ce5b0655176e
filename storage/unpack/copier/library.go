package copier

import (
	"context"
	"io"
	"os"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/unpack/layers"
)

// library is a store for containers/image. PutLayer unpacks the layers of one image, one after the
// other, as layers.Intake does.
type library struct {
	cstorage.Store
	ctx   context.Context //nolint:containedctx // of the copy: the library's interface has none
	into  layers.Target
	blobs int64 // bytes of the compressed layers that have been added
}

// PutLayer implements cstorage.Store.
func (l *library) PutLayer(id, parent string, names []string, mountLabel string, writeable bool, options *cstorage.LayerOptions, diff io.Reader) (*cstorage.Layer, int64, error) {
	if diff == nil || options == nil {
		return l.Store.PutLayer(id, parent, names, mountLabel, writeable, options, diff)
	}
	if _, err := l.Layer(id); err == nil {
		return nil, -1, cstorage.ErrDuplicateID
	}
	if err := l.into.CheckRepeat(options.UncompressedDigest); err != nil {
		return nil, -1, err
	}
	known := layers.Record{Blob: options.OriginalDigest, Content: options.UncompressedDigest}
	if options.OriginalDigest != "" && options.OriginalSize != nil {
		known.Size = *options.OriginalSize
	}
	record, err := layers.PutStream(l.ctx, l.into, layers.Stream{ID: id, Parent: parent, Blob: diff, Known: known, Others: l.blobs, Largest: sizeOf(diff)})
	if err != nil {
		return nil, -1, err
	}
	l.blobs += record.Size
	layer, err := l.Layer(id)
	return layer, -1, err
}

// sizeOf returns the bytes of a compressed layer that containers/image has in a file, or 0.
func sizeOf(diff io.Reader) int64 {
	if file, is := diff.(interface{ Stat() (os.FileInfo, error) }); is {
		if st, err := file.Stat(); err == nil {
			return st.Size()
		}
	}
	return 0
}
