// Package gunzip decompresses gzip (RFC 1952), in which nearly all layers come. Its input may be hostile: what it takes is bounded,
// and what it returns is no more than what the input says.
package gunzip

import (
	"compress/gzip"
	"encoding/binary"
	"hash/crc32"
	"io"
	"sync"
)

// Reader decompresses gzip. While what it has read is used, it decompresses what comes next.
type Reader struct {
	members     members
	full, empty chan *block
	current     *block        // nil: none yet
	unread      []byte        // of current
	stop        chan struct{} // closed: nobody reads any more; nil: nothing is decompressed ahead
}

// readers are used again: to allocate one costs more than to decompress a small layer.
var readers sync.Pool

// blocks is how many a reader has at most: one is read, one is full and one is being filled.
const blocks = 3

// NewReader returns a reader of the content of all members of source. What follows the last one and is none, such as padding,
// is read and ignored, as by gzip. Errors are those of source, gzip.ErrHeader, gzip.ErrChecksum, io.ErrUnexpectedEOF, or
// say that data are invalid.
func NewReader(source io.Reader) *Reader {
	r, again := readers.Get().(*Reader)
	if !again {
		r = &Reader{full: make(chan *block, blocks), empty: make(chan *block, blocks)}
	}
	r.members.start(source)
	return r
}

// Read implements io.Reader. It must not be called after Close.
func (r *Reader) Read(p []byte) (int, error) {
	for len(r.unread) == 0 {
		if r.current != nil && r.current.err != nil {
			return 0, r.current.err
		}
		r.next()
	}
	n := copy(p, r.unread)
	r.unread = r.unread[n:]
	return n, nil
}

// next goes on to the next block. The first one is filled here: a small layer has no other, and needs no goroutine.
func (r *Reader) next() {
	switch {
	case r.current == nil:
		select {
		case r.current = <-r.empty:
		default:
			r.current = new(block)
		}
		r.members.fill(r.current, nil)
	case r.stop == nil:
		for len(r.empty) < blocks-1 {
			r.empty <- new(block)
		}
		r.stop = make(chan struct{})
		go r.ahead(r.current, r.stop)
		fallthrough
	default:
		r.empty <- r.current
		r.current = <-r.full
	}
	r.unread = r.current.data[r.current.begin:r.current.end]
}

// ahead fills blocks with what follows the last one.
func (r *Reader) ahead(last *block, stop <-chan struct{}) {
	for ended := false; !ended; {
		select {
		case b := <-r.empty:
			r.members.fill(b, last)
			ended = b.err != nil
			last = b
			r.full <- b
		case <-stop:
			return
		}
	}
}

// Close implements io.Closer, and must be called once. A reader that is stopped midway may still be reading its source.
func (r *Reader) Close() error {
	if r.stop != nil {
		close(r.stop)
		if r.current.err == nil {
			return nil
		}
	}
	if r.current != nil {
		r.empty <- r.current
	}
	r.current, r.unread, r.stop = nil, nil, nil
	r.members.start(nil)
	readers.Put(r)
	return nil
}

// members decompresses one member after the other.
type members struct {
	inflater
	inside bool // a member
	any    bool // there was one
	sum    uint32
	size   uint32
}

func (m *members) start(source io.Reader) {
	m.input.start(source)
	m.inside, m.any = false, false
}

// fill fills b with what follows the last block, if there is one.
func (m *members) fill(b, last *block) {
	b.begin, b.err = 0, nil
	if last != nil {
		before := max(0, last.end-window)
		b.begin = copy(b.data[:], last.data[before:last.end])
		m.oldest = max(0, m.oldest-before)
	}
	for b.end = b.begin; b.end < window+room && b.err == nil; {
		b.err = m.more(b)
	}
}

// more decompresses what there is room for in b, but not of two members. It returns io.EOF after the last one.
func (m *members) more(b *block) error {
	if !m.inside {
		if err := m.header(); err != nil {
			return err
		}
		m.inflater.begin(b.end)
		m.inside, m.any, m.sum, m.size = true, true, 0, 0
	}
	from := b.end
	ended, err := m.inflate(b)
	m.sum = crc32.Update(m.sum, crc32.IEEETable, b.data[from:b.end])
	m.size += uint32(b.end - from) //nolint:gosec // modulo 2^32, as in the trailer
	if !ended || err != nil {
		return err
	}
	m.inside = false
	return m.trailer()
}

// header reads the header of a member.
func (m *members) header() error {
	err := m.skipHeader()
	if err == nil || !m.any {
		return err
	}
	for m.failed == nil {
		_, _ = m.bytes(buffered) // m.failed has the error
	}
	return m.failed
}

func (m *members) skipHeader() error {
	const magic, hasSum, hasExtra, hasName, hasComment = "\x1f\x8b\x08", 1 << 1, 1 << 2, 1 << 3, 1 << 4
	var header [10]byte
	if err := m.exactly(header[:]); err != nil {
		return err
	}
	if string(header[:len(magic)]) != magic {
		return gzip.ErrHeader
	}
	flags := header[3]
	if flags&hasExtra != 0 {
		size := header[:2]
		if err := m.exactly(size); err != nil {
			return err
		}
		if err := m.exactly(make([]byte, binary.LittleEndian.Uint16(size))); err != nil {
			return err
		}
	}
	for _, has := range []byte{hasName, hasComment} {
		for char := header[:1]; flags&has != 0; {
			if err := m.exactly(char); err != nil {
				return err
			}
			if char[0] == 0 {
				break
			}
		}
	}
	if flags&hasSum != 0 {
		return m.exactly(header[:2])
	}
	return nil
}

// trailer reads what follows the data of a member, and compares.
func (m *members) trailer() error {
	var trailer [8]byte
	if err := m.exactly(trailer[:]); err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(trailer[:]) != m.sum || binary.LittleEndian.Uint32(trailer[4:]) != m.size {
		return gzip.ErrChecksum
	}
	return nil
}
