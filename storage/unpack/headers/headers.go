// Package headers reads a tar archive on its way to the unpacker. A caller sees the headers of each
// entry before the unpacker does, and can remove extended attributes from them. The archive keeps
// its length.
//
// archive/tar reads the headers, as it does in the unpacker, so the two cannot differ about them.
// This package only finds where the next headers are. It refuses what archive/tar refuses.
package headers

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// Entry is the result of archive/tar for the headers of one entry. A global PAX header is an entry
// as well: unpackers make directories for its name. An Entry is valid until the function that gets
// it returns.
type Entry struct {
	*tar.Header
	Holes int64 // bytes of a sparse file that are not in the archive
}

// ErrInvalid is the error of an archive that cannot be parsed.
var ErrInvalid = errors.New("invalid tar header")

// Reader passes an archive on.
type Reader struct {
	from  io.Reader
	check func(*Entry) error
	drop  func(kind byte, xattr string) bool

	blocks []byte // headers of the entry, with the map of a sparse file
	out    []byte // the end of blocks that has not been passed on
	left   int64  // bytes of content and padding before the next header
	ended  bool   // no header follows
	failed error  // error of the headers; returned after out
	err    error  // of Read
}

// NewReader returns a reader of the decompressed archive from. If check fails for an entry, Read
// fails with its error. Extended attributes for which drop returns true get names without a
// meaning. Both functions may be nil.
func NewReader(from io.Reader, check func(*Entry) error, drop func(kind byte, xattr string) bool) *Reader {
	return &Reader{from: from, check: check, drop: drop}
}

// Read implements io.Reader. It fills p unless the archive ends or fails, so small entries do not
// need a call each.
func (r *Reader) Read(p []byte) (n int, err error) {
	for n < len(p) && r.err == nil {
		var more int
		more, r.err = r.read(p[n:])
		n += more
	}
	if n > 0 {
		return n, nil
	}
	return 0, r.err
}

// read fills a part of p.
func (r *Reader) read(p []byte) (n int, err error) {
	if len(r.out) == 0 && r.failed != nil {
		return 0, r.failed
	}
	if len(r.out) == 0 && r.left == 0 && !r.ended {
		r.failed = r.next()
	}
	switch {
	case len(r.out) > 0:
		n = copy(p, r.out)
		r.out = r.out[n:]
	case r.ended:
		n, err = r.from.Read(p)
	case r.failed == nil:
		n, err = r.from.Read(p[:min(int64(len(p)), r.left)])
		r.left -= int64(n)
	}
	return n, err
}

const (
	blockSize = 512
	maxBlocks = 8 << 20 // bytes of all headers of an entry; archive/tar accepts 1 MiB of each
)

// Types of headers that archive/tar skips.
const (
	typePAX    = tar.TypeXHeader
	typeGlobal = tar.TypeXGlobalHeader // no entry follows
	typeName   = tar.TypeGNULongName
	typeLink   = tar.TypeGNULongLink
)

// next reads the headers of an entry, checks them and passes them on. If the archive ends within
// them, they are passed on unchanged.
func (r *Reader) next() error {
	r.blocks = r.blocks[:0]
	from := gatherer{Reader: r}
	header, err := tar.NewReader(&from).Next() // reads only the headers
	switch {
	case errors.Is(from.err, ErrInvalid):
		return from.err
	case from.err != nil && !errors.Is(from.err, io.EOF):
		r.out = r.blocks
		return from.err
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		r.ended, r.out = true, r.blocks
		return nil
	case err != nil:
		return fmt.Errorf("%w (%w)", ErrInvalid, err)
	}
	entry := Entry{Header: header}
	if err := r.look(&entry); err != nil {
		return err
	}
	if r.check != nil {
		if err := r.check(&entry); err != nil {
			return err
		}
	}
	r.out = r.blocks
	return nil
}

// gatherer copies what is read of headers to blocks.
type gatherer struct {
	*Reader
	err error
}

// Read implements io.Reader.
func (g *gatherer) Read(p []byte) (int, error) {
	if len(g.blocks)+len(p) > maxBlocks {
		g.err = fmt.Errorf("%w: the headers of an entry have more than %d bytes", ErrInvalid, maxBlocks)
		return 0, g.err
	}
	var n int
	n, g.err = g.from.Read(p)
	g.blocks = append(g.blocks, p[:n]...)
	return n, g.err
}

// look finds the end of the entry in blocks, and drops attributes.
func (r *Reader) look(e *Entry) error {
	var records []record // of the last PAX header
	for at := 0; ; {
		if at+blockSize > len(r.blocks) {
			return fmt.Errorf("%w: an entry without a header", ErrInvalid)
		}
		block := r.blocks[at : at+blockSize]
		at += blockSize
		kind := block[156]
		switch kind {
		case typePAX, typeGlobal, typeName, typeLink:
		default:
			if err := r.discard(e, records); err != nil {
				return err
			}
			return r.content(e, block, at)
		}
		size, err := number(block[124:136])
		if err != nil || size < 0 || size > int64(len(r.blocks)-at) {
			return fmt.Errorf("%w: size %q", ErrInvalid, block[124:136])
		}
		content := r.blocks[at : at+int(size)]
		at += int(size + padding(size))
		if kind == typePAX || kind == typeGlobal {
			if records, err = parse(content); err != nil {
				return err
			}
		}
		if kind == typeGlobal {
			return r.global(e, records, at)
		}
	}
}

// global handles a PAX header for all following entries, which ends at index end. archive/tar
// ignores a header with an invalid value, and tar-split does not.
func (r *Reader) global(e *Entry, records []record, end int) error {
	if e.Typeflag != typeGlobal || len(records) > 0 && len(e.PAXRecords) == 0 {
		return fmt.Errorf("%w: a global PAX header with a wrong value", ErrInvalid)
	}
	return r.until(int64(end))
}

// content handles an entry whose own header is block, which ends at index at.
func (r *Reader) content(e *Entry, block []byte, at int) error {
	if block[156] == tar.TypeGNUSparse {
		at = len(r.blocks) // more of its map was before the content
	}
	size, err := stored(e.Header, block)
	if err != nil || size < 0 || size > math.MaxInt64-maxBlocks-blockSize {
		return fmt.Errorf("%w: size %q", ErrInvalid, block[124:136])
	}
	if !headerOnly(e.Typeflag) {
		e.Holes = max(e.Size-size, 0)
	}
	return r.until(int64(at) + size + padding(size))
}

// stored returns how many bytes an entry has in the archive, which for a sparse file is not Size.
func stored(h *tar.Header, block []byte) (int64, error) {
	if headerOnly(h.Typeflag) {
		return 0, nil
	}
	if said := h.PAXRecords["size"]; said != "" {
		return strconv.ParseInt(said, 10, 64)
	}
	return number(block[124:136])
}

// until sets where the next header is, counted from the beginning of blocks.
func (r *Reader) until(end int64) error {
	if r.left = end - int64(len(r.blocks)); r.left < 0 {
		return fmt.Errorf("%w: a map of a sparse file that is longer than its content", ErrInvalid)
	}
	return nil
}

const (
	xattrPrefix   = "SCHILY.xattr."
	droppedPrefix = "CRIUS.dropped"
)

// discard renames attributes, in the archive and in the Entry.
func (r *Reader) discard(e *Entry, records []record) error {
	unwanted := func(key string) bool {
		name, is := strings.CutPrefix(key, xattrPrefix)
		return is && r.drop != nil && r.drop(e.Typeflag, name)
	}
	for _, record := range records {
		if key := string(record.key); unwanted(key) {
			copy(record.key, droppedPrefix)
			delete(e.PAXRecords, key)
		}
	}
	for key := range e.PAXRecords {
		if unwanted(key) {
			return fmt.Errorf("%w: PAX record %.100q", ErrInvalid, key)
		}
	}
	return nil
}
