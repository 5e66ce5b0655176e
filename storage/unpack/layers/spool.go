package layers

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"

	"github.com/klauspost/pgzip"
	"github.com/opencontainers/go-digest"
	"go.podman.io/storage/pkg/archive"

	"github.com/crius-run/crius/internal/fault"
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
	left, err := r.more()
	if left == 0 || err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	n, err := r.file.ReadAt(p[:min(int64(len(p)), left)], r.offset)
	r.offset += int64(n)
	return n, err
}

// more returns how many bytes can be read, at least one if there is no error.
func (r *spoolReader) more() (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.size == r.offset && r.err == nil {
		r.changed.Wait()
	}
	return r.size - r.offset, r.err
}

// content is the decompressed content of a layer's blob. Read returns io.EOF only after blob and
// content were found to have their digests.
type content struct {
	io.ReadCloser // decompresses
	layer         *step
	digester      digest.Digester
	err           error // the first error of Read
	checked       bool  // it was read to its end, and has its digest
	second        bool  // the layer is being read again
}

// again implements readable.
func (c *content) again() (io.ReadCloser, error) {
	second, err := c.layer.open()
	if err == nil {
		second.second = true
	}
	return second, err
}

// open begins to decompress the layer.
func (s *step) open() (*content, error) {
	decompressed, err := decompress(&spoolReader{spool: s.blob})
	if err != nil {
		return nil, err
	}
	return &content{ReadCloser: decompressed, layer: s, digester: s.DiffID.Algorithm().Digester()}, nil
}

// decompress decompresses a blob like archive.DecompressStream, but gzip with smaller buffers,
// which otherwise cost more than a small layer.
func decompress(blob io.Reader) (io.ReadCloser, error) {
	const buffer, buffers = 128 << 10, 4
	reader := bufio.NewReaderSize(blob, 32<<10)
	first, _ := reader.Peek(10) // an error comes back with the next read
	if archive.DetectCompression(first) == archive.Gzip && !hasPigz() {
		unpacked, err := pgzip.NewReaderN(reader, buffer, buffers)
		return gunzip{unpacked}, err
	}
	return archive.DecompressStream(reader)
}

type gunzip struct{ *pgzip.Reader }

// Close implements io.Closer. Read has returned any error of the blob.
func (g gunzip) Close() error {
	_ = g.Reader.Close()
	return nil
}

// hasPigz reports whether pigz is installed, which the library prefers.
var hasPigz = sync.OnceValue(func() bool {
	_, err := exec.LookPath("pigz")
	return err == nil
})

// Read implements io.Reader.
func (c *content) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	_, _ = c.digester.Hash().Write(p[:n]) // never fails
	if errors.Is(err, io.EOF) {
		if failed := c.check(); failed != nil {
			err = failed
		}
	}
	if c.err == nil && err != nil && !errors.Is(err, io.EOF) {
		c.err = err
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
