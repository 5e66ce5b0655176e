package extract

import (
	"errors"
	"fmt"
	"io"

	"github.com/crius-run/crius/internal/fault"
)

// maxHeaders is how many bytes all headers of an entry may have. archive/tar accepts 1 MiB of each,
// and any number.
const maxHeaders = 8 << 20

// archive is the archive of a layer on its way to archive/tar. It keeps headers.
type archive struct {
	from    io.Reader
	size    int64  // bytes that were read
	headers []byte // those since keep
	keeping bool
	failed  error // of from, or because of headers that are too long
}

// Read implements io.Reader.
func (a *archive) Read(p []byte) (int, error) {
	n, err := a.from.Read(p)
	a.size += int64(n)
	if a.keeping {
		if len(a.headers)+n > maxHeaders {
			a.failed = fmt.Errorf("the headers of an entry have more than %d bytes; rebuild the image: %w", maxHeaders, fault.Invalid)
			return 0, a.failed
		}
		a.headers = append(a.headers, p[:n]...)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		a.failed = err
	}
	return n, err
}

// keep begins to keep what is read.
func (a *archive) keep() { a.headers, a.keeping = a.headers[:0], true }

// kept returns what was read since keep, until the next keep.
func (a *archive) kept() []byte {
	a.keeping = false
	return a.headers
}

// file is the content of an entry, holes of sparse files included. It counts them and sums up the
// content for tar-split.
type file struct {
	layer      *layer
	left, size int64
	sum        checksum
}

// next returns the next part of the content in the layer's buffer, or io.EOF.
func (f *file) next() ([]byte, error) {
	l, buffer := f.layer, f.layer.buffers.content
	n, before := 0, l.archive.size
	var err error
	for n < len(buffer) && err == nil {
		var more int
		more, err = l.entries.Read(buffer[n:])
		n += more
		if int64(n) == f.left && err == nil {
			break
		}
	}
	if l.archive.failed != nil {
		return nil, l.archive.failed
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, noArchive(err)
	}
	f.size += int64(n)
	f.left -= int64(n)
	if n == 0 {
		return nil, io.EOF
	}
	if holes := int64(n) - (l.archive.size - before); holes > 0 {
		if err := l.Check.Holes(holes); err != nil {
			return nil, err
		}
	}
	f.sum = f.sum.with(buffer[:n])
	return buffer[:n], nil
}

// discard reads the rest of the content.
func (f *file) discard() error {
	for {
		if _, err := f.next(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
