package layers

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/ulikunitz/xz"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/frames"
	"github.com/crius-run/crius/storage/unpack/gunzip"
)

// spool is a blob that is read while it comes. It is in a file that the server writes, or in a file
// without a name that the spool writes itself.
type spool struct {
	dir string

	mu      sync.Mutex
	changed sync.Cond
	file    *os.File // nil until the first byte
	size    int64    // bytes that have come
	err     error    // why no more bytes come; io.EOF: the blob is whole
}

var errClosed = errors.New("the blob is no longer needed")

// newSpool returns a spool that makes its file in dir.
func newSpool(dir string) *spool {
	s := &spool{dir: dir}
	s.changed.L = &s.mu
	return s
}

// Write implements io.Writer. Only one goroutine may write.
func (s *spool) Write(p []byte) (int, error) {
	file, err := s.open()
	if err != nil {
		return 0, err
	}
	n, err := file.Write(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.size += int64(n)
	s.changed.Broadcast()
	return n, err
}

func (s *spool) open() (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || s.file != nil {
		return s.file, s.err
	}
	file, err := os.CreateTemp(s.dir, "blob-")
	if err != nil {
		return nil, err
	}
	s.file = file
	return file, os.Remove(file.Name())
}

// show makes readers read file, in which size bytes have arrived. Close closes the file.
func (s *spool) show(file *os.File, size int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	s.file, s.size = file, size
	s.changed.Broadcast()
	return nil
}

// end tells readers that everything has been written, or why no more will be.
func (s *spool) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		if s.err = err; err == nil {
			s.err = io.EOF
		}
	}
	s.changed.Broadcast()
}

// ended reports whether end was called.
func (s *spool) ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err != nil
}

// close closes the file, and so frees its space.
func (s *spool) close() {
	s.end(errClosed)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file != nil {
		_ = s.file.Close() // nobody reads it any more
	}
}

// wait returns when everything has been written, or with the reason why it will not be.
func (s *spool) wait() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.err == nil {
		s.changed.Wait()
	}
	if errors.Is(s.err, io.EOF) {
		return nil
	}
	return s.err
}

// whole waits until everything has been written, and returns the number of bytes.
func (s *spool) whole() (int64, error) {
	if err := s.wait(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.size, nil
}

// spoolReader reads a spool from its beginning.
type spoolReader struct {
	*spool
	offset int64
}

// Read implements io.Reader. It waits for bytes that have not come.
func (r *spoolReader) Read(p []byte) (int, error) {
	file, left, err := r.more()
	if left == 0 || err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	n, err := file.ReadAt(p[:min(int64(len(p)), left)], r.offset)
	r.offset += int64(n)
	return n, err
}

// more returns the file and how many bytes can be read, at least one if there is no error.
func (r *spoolReader) more() (*os.File, int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.size == r.offset && r.err == nil {
		r.changed.Wait()
	}
	return r.file, r.size - r.offset, r.err
}

// content is the decompressed content of a layer's blob. Read returns io.EOF only after blob and
// content were found to have their digests.
type content struct {
	io.ReadCloser                 // decompresses
	ctx           context.Context //nolint:containedctx // of the reads
	layer         *step
	digester      digest.Digester
	head          []byte // its first bytes, up to maxMagic
	checked       bool   // it was read to its end, and has its digest
	failed        error  // of the decompression
}

// open begins to decompress the layer. A decoder that needs much memory takes a place in large.
func (s *step) open(ctx context.Context, large chan struct{}) (*content, error) {
	decompressed, err := decompress(&spoolReader{spool: s.blob}, func() (func(), error) {
		select {
		case large <- struct{}{}:
			return func() { <-large }, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	})
	if err != nil {
		return nil, err
	}
	return &content{ReadCloser: decompressed, ctx: ctx, layer: s, digester: s.DiffID.Algorithm().Digester()}, nil
}

// decompress decompresses a blob. It calls large before it decodes a frame of zstd that needs much memory, and calls done
// when the result is closed.
//
// No program does it, such as pigz: those take more CPU, also for a large layer, and memory of their own, and are not the same on
// all nodes: pigz, built with some versions of zlib-ng, takes whole layers for damaged.
func decompress(blob io.Reader, large func() (done func(), err error)) (io.ReadCloser, error) {
	reader := bufio.NewReaderSize(blob, 32<<10)
	first, _ := reader.Peek(maxMagic) // an error comes back with the next read
	switch compressionOf(first) {
	case "gzip":
		return gunzip.NewReader(reader), nil
	case "zstd":
		return unzstd(reader, large)
	case "bzip2":
		return io.NopCloser(bzip2.NewReader(reader)), nil
	case "xz":
		unpacked, err := xz.NewReader(reader)
		return io.NopCloser(unpacked), err
	}
	return io.NopCloser(reader), nil
}

// compressionOf returns how what begins with these bytes is compressed, or "" if it is not.
func compressionOf(first []byte) string {
	switch {
	case bytes.HasPrefix(first, []byte("\x1f\x8b\x08")):
		return "gzip"
	case bytes.HasPrefix(first, []byte("BZh")):
		return "bzip2"
	case bytes.HasPrefix(first, []byte("\xfd7zXZ\x00")):
		return "xz"
	case frames.Begin(first):
		return "zstd"
	}
	return ""
}

// maxMagic is how many bytes say how something is compressed.
const maxMagic = 10

// errTwice returns the error of a layer whose decompressed content begins with head, if that is compressed as well.
func errTwice(head []byte) error {
	inner := compressionOf(head)
	if inner == "" {
		return nil
	}
	return fmt.Errorf("it is compressed twice: what it decompresses to is %s; rebuild the image: %w", inner, fault.Invalid)
}

// decoders of zstd have read a stream with small windows to its end.
var decoders sync.Pool

// unzstd decompresses zstd.
func unzstd(blob io.Reader, large func() (done func(), err error)) (io.ReadCloser, error) {
	windows := &windowed{blob: blob, admit: large}
	windows.parser.Window = windows.window
	var err error
	decoder, again := decoders.Get().(*zstd.Decoder)
	if again {
		err = decoder.Reset(windows)
	} else {
		decoder, err = zstd.NewReader(windows)
	}
	if err != nil {
		return nil, err
	}
	return &unzstded{decoder: decoder, blob: windows}, nil
}

// smallWindow is the size of a window of zstd that each layer may have, in bytes. Nearly all have
// less.
const smallWindow = 8 << 20

// windowed is a zstd blob. A frame with a large window waits for room before a decoder sees it.
type windowed struct {
	blob   io.Reader
	admit  func() (done func(), err error)
	parser frames.Parser
	large  bool // a frame had a large window

	mu     sync.Mutex
	done   func() // gives up the room; nil: there is none
	closed bool
}

// Read implements io.Reader. A decoder may still call it after close.
func (w *windowed) Read(p []byte) (int, error) {
	n, err := w.blob.Read(p)
	if failed := w.parser.Parse(p[:n]); failed != nil {
		if errors.Is(failed, frames.ErrInvalid) {
			failed = fmt.Errorf("%w; rebuild the image: %w", failed, fault.Invalid)
		}
		return 0, failed
	}
	return n, err
}

// window waits for room for a frame.
func (w *windowed) window(bytes uint64) error {
	if bytes <= smallWindow || w.large {
		return nil
	}
	done, err := w.admit()
	if err != nil {
		return err
	}
	w.large = true
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		done()
		return errClosed
	}
	w.done = done
	return nil
}

// close gives up the room.
func (w *windowed) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done != nil {
		w.done()
	}
	w.closed, w.done = true, nil
}

// unzstded is decompressed zstd.
type unzstded struct {
	decoder *zstd.Decoder
	blob    *windowed
	whole   bool // it was read to its end
}

// Read implements io.Reader.
func (u *unzstded) Read(p []byte) (int, error) {
	n, err := u.decoder.Read(p)
	u.whole = errors.Is(err, io.EOF)
	return n, err
}

// Close implements io.Closer. A decoder that was stopped midway may still be reading.
func (u *unzstded) Close() error {
	defer u.blob.close()
	if u.whole && !u.blob.large && u.decoder.Reset(nil) == nil {
		decoders.Put(u.decoder)
	} else {
		u.decoder.Close()
	}
	return nil
}

// Read implements io.Reader.
func (c *content) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	n, err := c.ReadCloser.Read(p)
	c.head = append(c.head, p[:min(n, maxMagic-len(c.head))]...)
	_, _ = c.digester.Hash().Write(p[:n]) // never fails
	switch {
	case errors.Is(err, io.EOF):
		if failed := c.check(); failed != nil {
			err = failed
		}
	case errors.Is(err, io.ErrUnexpectedEOF) && c.check() == nil: // of gzip, whose trailer may be all that is missing
		err = io.EOF
	case err != nil:
		c.failed = err
	}
	return n, err
}

func (c *content) check() error {
	if err := c.layer.blob.wait(); err != nil {
		return err
	}
	if got := c.digester.Digest(); got != c.layer.DiffID {
		return fmt.Errorf("its content has the digest %s, but the image's config says %s; rebuild the image: %w", got, c.layer.DiffID, fault.Invalid)
	}
	c.checked = true
	return nil
}
