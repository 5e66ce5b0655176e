// Package headers reads a tar archive on its way to the program that unpacks it: a caller
// sees what the headers of each entry say before that program does, and can take extended
// attributes from them. The archive keeps its length.
//
// It finds headers where archive/tar does, which unpacks layers. What archive/tar refuses may
// pass here, but no archive in which both could disagree about where the next header is.
package headers

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Entry is what the headers of one entry say. It is valid until the function that is given it
// returns.
type Entry struct {
	Type byte // as in archive/tar
	// Names are all that the headers call the entry, of which one counts, and Links all that
	// they call its target.
	Names, Links [][]byte
	UIDs, GIDs   []int64 // all that the headers say; one counts
}

// ErrInvalid is the error of an archive that cannot be parsed.
var ErrInvalid = errors.New("invalid tar header")

// Reader passes an archive on.
type Reader struct {
	from  io.Reader
	check func(*Entry) error
	drop  func(kind byte, xattr string) bool

	entry  Entry
	parts  []part // of headers
	blocks []byte // headers of the entry
	out    []byte // the end of blocks, which has not been passed on
	left   int64  // bytes of content and padding before the next header
	ended  bool   // no header follows
	failed error  // of the headers; comes after out
	err    error  // of Read
}

// part is a header with its content, which describes the entry that follows or is the entry's own.
type part struct {
	kind byte
	at   int   // index of the content in blocks
	size int64 // of the content as the header says, in bytes
}

// NewReader returns a reader of the decompressed archive from. If check fails for an entry,
// Read fails with its error. Extended attributes for which drop returns true are passed on
// under names that mean nothing. Both functions may be nil.
func NewReader(from io.Reader, check func(*Entry) error, drop func(kind byte, xattr string) bool) *Reader {
	return &Reader{from: from, check: check, drop: drop}
}

// Read implements io.Reader. It fills p unless the archive ends or fails, so that entries
// that are small cost no call each.
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

// read reads a part of p.
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
	maxMeta   = 1 << 20 // bytes that a header before the entry's own may have; archive/tar takes no more
	maxBlocks = 8 << 20 // bytes of all headers of an entry
)

// Types of headers that archive/tar names otherwise or not at all.
const (
	typeOld    = 0 // a file, or a directory if its name ends with a slash
	typePAX    = 'x'
	typeGlobal = 'g' // no entry follows
	typeName   = 'L'
	typeLink   = 'K'
	typeSparse = 'S' // of old GNU tar
)

// next reads the headers of an entry, shows them and has them passed on. An archive that
// ends within them is passed on as it is.
func (r *Reader) next() error {
	r.parts, r.blocks = r.parts[:0], r.blocks[:0]
	err := r.gather()
	if err == nil && !r.ended {
		err = r.look()
		if err != nil {
			return err
		}
	}
	if errors.Is(err, ErrInvalid) {
		return err
	}
	r.out = r.blocks
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return err
}

// gather reads up to the content of the entry.
func (r *Reader) gather() error {
	for {
		block, err := r.more(blockSize)
		if err != nil {
			return err
		}
		if bytes.Equal(block, zeros[:]) {
			r.ended = true
			return nil
		}
		if !sumRight(block) {
			return fmt.Errorf("%w: wrong checksum", ErrInvalid)
		}
		size, err := number(block[124:136])
		if err != nil || size < 0 {
			return fmt.Errorf("%w: size %q", ErrInvalid, block[124:136])
		}
		p := part{block[156], len(r.blocks), size}
		r.parts = append(r.parts, p)
		switch p.kind {
		case typePAX, typeGlobal, typeName, typeLink:
			if size > maxMeta {
				return fmt.Errorf("%w: it has %d bytes", ErrInvalid, size)
			}
			if _, err := r.more(size + padding(size)); err != nil || p.kind == typeGlobal {
				return err
			}
		case typeSparse:
			return r.sparseMaps(block[482] != 0)
		default:
			return nil
		}
	}
}

var zeros [blockSize]byte

// sparseMaps reads the blocks in which the map of a sparse file goes on.
func (r *Reader) sparseMaps(more bool) error {
	for more {
		block, err := r.more(blockSize)
		if err != nil {
			return err
		}
		more = block[504] != 0
	}
	return nil
}

// more reads so many bytes into blocks, and returns them until it is called again.
func (r *Reader) more(size int64) ([]byte, error) {
	had := len(r.blocks)
	if int64(had)+size > maxBlocks {
		return nil, fmt.Errorf("%w: the headers of an entry have more than %d bytes", ErrInvalid, maxBlocks)
	}
	r.blocks = slices.Grow(r.blocks, int(size))[:had+int(size)]
	n, err := io.ReadFull(r.from, r.blocks[had:])
	r.blocks = r.blocks[:had+n]
	return r.blocks[had:], err
}

// look shows the entry that has been gathered.
func (r *Reader) look() error {
	own := r.parts[len(r.parts)-1]
	r.entry.reset(own.kind)
	var records []record // the last header's alone
	for _, p := range r.parts[:len(r.parts)-1] {
		content := r.blocks[p.at : p.at+int(p.size)]
		switch p.kind {
		case typePAX:
			var err error
			if records, err = parse(content); err != nil {
				return err
			}
		case typeName:
			r.entry.Names = append(r.entry.Names, text(content))
		case typeLink:
			r.entry.Links = append(r.entry.Links, text(content))
		}
	}
	if own.kind == typeGlobal {
		return nil // which archive/tar applies to no entry
	}
	r.entry.add(r.blocks[own.at-blockSize : own.at])
	size := own.size
	for _, record := range records {
		if err := r.entry.record(record, own.size, &size); err != nil {
			return err
		}
		if name, is := bytes.CutPrefix(record.key, []byte(xattrPrefix)); is && r.drop != nil && r.drop(own.kind, string(name)) {
			copy(record.key, droppedPrefix)
		}
	}
	if own.kind == typeOld && size > 0 && slices.ContainsFunc(r.entry.Names, func(n []byte) bool { return bytes.HasSuffix(n, []byte("/")) }) {
		return fmt.Errorf("%w: a directory with content", ErrInvalid)
	}
	if !headerOnly(own.kind) {
		r.left = size + padding(size)
	}
	if r.check != nil {
		return r.check(&r.entry)
	}
	return nil
}

const (
	xattrPrefix   = "SCHILY.xattr."
	droppedPrefix = "CRIUS.dropped"
)

func (e *Entry) reset(kind byte) {
	e.Type = kind
	e.Names, e.Links, e.UIDs, e.GIDs = e.Names[:0], e.Links[:0], e.UIDs[:0], e.GIDs[:0]
}

// add notes what an entry's own header says. Numbers that are none archive/tar refuses.
func (e *Entry) add(block []byte) {
	name := text(block[:100])
	if prefix := text(block[345:500]); len(prefix) > 0 { // unless the format has none
		name = slices.Concat(prefix, []byte("/"), name)
	}
	e.Names = append(e.Names, name)
	e.Links = append(e.Links, text(block[157:257]))
	for _, owner := range []struct {
		ids   *[]int64
		field []byte
	}{{&e.UIDs, block[108:116]}, {&e.GIDs, block[116:124]}} {
		if id, err := number(owner.field); err == nil {
			*owner.ids = append(*owner.ids, id)
		}
	}
}

// record notes what a record of a PAX header says. The entry's own header says that it has
// own bytes.
func (e *Entry) record(r record, own int64, size *int64) error {
	switch string(r.key) {
	case "path", "GNU.sparse.name":
		e.Names = append(e.Names, r.value)
	case "linkpath":
		e.Links = append(e.Links, r.value)
	case "uid", "gid":
		ids := &e.UIDs
		if r.key[0] == 'g' {
			ids = &e.GIDs
		}
		if id, err := decimal(r.value); err == nil {
			*ids = append(*ids, id)
		}
	case "size":
		if len(r.value) == 0 {
			*size = own // whatever records before this one say
			return nil
		}
		said, err := decimal(r.value)
		if err != nil || said < 0 {
			return fmt.Errorf("%w: size %q", ErrInvalid, r.value[:min(len(r.value), 32)])
		}
		*size = said
	}
	return nil
}
