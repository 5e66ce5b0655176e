package layers

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
)

// Library returns a store for containers/image, whose PutLayer unpacks the layers of one image, one
// after the other, as an Intake does.
func Library(ctx context.Context, store cstorage.Store, into Target) cstorage.Store {
	return &library{Store: store, ctx: ctx, into: into}
}

type library struct {
	cstorage.Store
	ctx   context.Context //nolint:containedctx // of the copy: the library's interface has none
	into  Target
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
	record, err := l.put(id, parent, options, diff)
	if err != nil {
		return nil, -1, err
	}
	l.blobs += record.Size
	layer, err := l.Layer(id)
	return layer, -1, err
}

// put unpacks and adds a layer.
func (l *library) put(id, parent string, options *cstorage.LayerOptions, diff io.Reader) (Record, error) {
	blob := newDigested(diff, options.OriginalDigest)
	unpacked, err := decompress(blob, func() (func(), error) { return func() {}, nil }) // there is one layer at a time
	if err != nil {
		return Record{}, err
	}
	defer unpacked.Close()
	plain := bufio.NewReaderSize(unpacked, 32<<10)
	first, _ := plain.Peek(maxMagic) // an error comes back with the next read
	if err := errTwice(first); err != nil {
		return Record{}, err
	}
	content := newDigested(plain, options.UncompressedDigest)
	staged, err := l.into.Stage(l.ctx, content, func() (int64, error) { return l.blobs + max(sizeOf(diff), blob.size.Load()), nil })
	if err != nil {
		return Record{}, err
	}
	record := Record{Blob: blob.digest(), Size: blob.size.Load(), Content: content.digest()}
	if options.OriginalDigest != "" && options.OriginalSize != nil {
		record.Size = *options.OriginalSize
	}
	_, err = l.into.Add(l.ctx, []Addition{{staged, id, parent, record}})
	return record, errors.Join(err, staged.Drop())
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

// digested counts and digests what is read, unless the digest is known.
type digested struct {
	io.Reader
	size     atomic.Int64 // gzip is read ahead
	known    digest.Digest
	digester digest.Digester // nil: it is known
}

func newDigested(from io.Reader, known digest.Digest) *digested {
	d := &digested{Reader: from, known: known}
	if known == "" || known.Algorithm() != digest.Canonical {
		d.digester = digest.Canonical.Digester()
	}
	return d
}

// Read implements io.Reader.
func (d *digested) Read(p []byte) (int, error) {
	n, err := d.Reader.Read(p)
	d.size.Add(int64(n))
	if d.digester != nil {
		_, _ = d.digester.Hash().Write(p[:n]) // never fails
	}
	return n, err
}

// digest returns the digest after everything was read.
func (d *digested) digest() digest.Digest {
	if d.digester != nil {
		return d.digester.Digest()
	}
	return d.known
}
