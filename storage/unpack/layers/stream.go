package layers

import (
	"bufio"
	"context"
	"errors"
	"io"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
)

// Stream is the blob of one layer, which somebody else downloads, or has.
type Stream struct {
	ID, Parent string    // an empty parent: it is the lowest layer
	Blob       io.Reader // read to its end
	Known      Record    // what is known of it: no digest and no size that is set is computed
	Others     int64     // bytes of the other blobs of its image
	Largest    int64     // bytes that the blob may have, if that is known
}

// PutStream unpacks a layer and adds it to the store of a target. It returns what the record says.
func PutStream(ctx context.Context, into Target, s Stream) (Record, error) {
	blob := newDigested(s.Blob, s.Known.Blob)
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
	content := newDigested(plain, s.Known.Content)
	staged, err := into.Stage(ctx, content, func() (int64, error) { return s.Others + max(s.Largest, blob.size.Load()), nil })
	if err != nil {
		return Record{}, err
	}
	record := Record{Blob: blob.digest(), Size: blob.size.Load(), Content: content.digest()}
	if s.Known.Size > 0 {
		record.Size = s.Known.Size
	}
	_, err = into.Add(ctx, []Addition{{staged, s.ID, s.Parent, record}})
	return record, errors.Join(err, staged.Drop())
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
