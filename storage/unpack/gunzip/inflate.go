package gunzip

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// errInvalid says that data cannot be decompressed.
var errInvalid = errors.New("invalid gzip data")

const (
	window = 32 << 10  // how far back a distance leads at most
	room   = 128 << 10 // of a block, for new bytes
	// spare is behind the room. What is decoded at once begins within the room: as many literals as there are bits, and the
	// longest match, whose last step may go beyond it.
	spare = 64 + maxMatch + step

	maxMatch = 258
	step     = 8 // bytes
)

// block is a piece of what was decompressed, and as much of what came before as a distance may lead back to.
type block struct {
	data       [window + room + spare]byte
	begin, end int   // of the piece
	err        error // after it
}

const (
	buffered = 64 << 10
	// behind is how many bytes that were read stay in front of those to be read: they may have to be read again.
	behind = 8
	// lookahead is how many bytes are there before something is decoded: it reads eight, and eight up to seven bytes further
	// on, and with the last bytes of the input seven may be read that are not there.
	lookahead = 24
)

// input has the next bits of the source.
type input struct {
	source io.Reader
	failed error // of the source
	buffer [behind + buffered + lookahead]byte
	at     int // in buffer: what is not in next
	size   int // of buffer, without the zeros that follow the end of the source
	next   pending
}

// pending are the next bits of an input, the first of them lowest.
type pending struct {
	word  uint64
	count uint // word may have more, which are read again
}

// drop returns the bits after the next n.
func (b pending) drop(n uint) pending { return pending{b.word >> (n & 63), b.count - n} }

// refilled returns 56 bits or more, and how many of the bytes that come next are among them.
func (b pending) refilled(bytes []byte) (pending, int) {
	return pending{b.word | binary.LittleEndian.Uint64(bytes)<<(b.count&63), b.count | 56}, int(63-b.count) / 8
}

// start begins with another source.
func (in *input) start(source io.Reader) {
	in.source, in.failed, in.at, in.size, in.next = source, nil, behind, behind, pending{}
}

// ensure reads from the source if there are not enough bytes to decode something.
func (in *input) ensure() error {
	if in.at+lookahead <= in.size {
		return nil
	}
	return in.read()
}

// read reads from the source until enough bytes are there to decode something, or, with zeros behind them, all that are left.
func (in *input) read() error {
	if in.failed == nil {
		in.size = copy(in.buffer[:], in.buffer[in.at-behind:in.size])
		in.at = behind
		for in.size < behind+lookahead && in.failed == nil {
			var n int
			n, in.failed = in.source.Read(in.buffer[in.size : len(in.buffer)-lookahead])
			in.size += n
		}
		clear(in.buffer[in.size : in.size+lookahead])
	}
	return in.over()
}

// over returns why there is nothing more, if more was taken than there is.
func (in *input) over() error {
	if in.at-int(in.next.count/8) > in.size {
		return in.ended()
	}
	return nil
}

// ended returns why there is nothing to read where something should be.
func (in *input) ended() error {
	if errors.Is(in.failed, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return in.failed
}

// peek returns the next bits, up to 16. There must be as many bytes as ensure has them.
func (in *input) peek(n uint) int {
	if in.next.count < n {
		var read int
		in.next, read = in.next.refilled(in.buffer[in.at:])
		in.at += read
	}
	return int(in.next.word & (1<<n - 1))
}

// take is peek, and goes on behind the bits.
func (in *input) take(n uint) int {
	taken := in.peek(n)
	in.next = in.next.drop(n)
	return taken
}

// align skips the rest of a byte. Bytes that come next are in the buffer then, and not in next.
func (in *input) align() error {
	in.at -= int(in.next.count / 8)
	in.next = pending{}
	return in.over()
}

// bytes returns bytes of the input, which must be aligned: at least one, and at most n.
func (in *input) bytes(n int) ([]byte, error) {
	if in.at == in.size {
		if err := in.read(); err != nil {
			return nil, err
		}
		if in.at == in.size {
			return nil, in.ended()
		}
	}
	taken := in.buffer[in.at:min(in.size, in.at+n)]
	in.at += len(taken)
	return taken, nil
}

// exactly reads bytes of the input, which must be aligned.
func (in *input) exactly(p []byte) error {
	for len(p) > 0 {
		bytes, err := in.bytes(len(p))
		if err != nil {
			return err
		}
		p = p[copy(p, bytes):]
	}
	return nil
}

// inflater decompresses DEFLATE (RFC 1951).
type inflater struct {
	input
	oldest int // in the block that is filled: the first byte to which distances may lead
	// What comes next is the header of a block, unless some are left of one whose bytes are stored or whose symbols are coded.
	stored int
	coded  bool
	last   bool // there is no block after it

	codes   *tables // of the block: fixed or dynamic
	dynamic tables
	orders  [1 << orderBits]entry
	widths  [286 + 30]uint8
}

// begin begins with data that refer to nothing before them, which will be at this place of a block.
func (d *inflater) begin(at int) { d.oldest, d.stored, d.coded, d.last = at, 0, false, false }

// inflate decompresses until b is full or the data end. The input is aligned then.
func (d *inflater) inflate(b *block) (ended bool, err error) {
	for b.end < window+room && err == nil {
		switch {
		case d.stored > 0:
			err = d.copy(b)
		case d.coded:
			err = d.decode(b)
		case d.last:
			return true, d.align()
		default:
			err = d.startBlock()
		}
	}
	if over := d.over(); over != nil { // only the zeros that follow the end are invalid
		err = over
	}
	return false, err
}

// copy copies bytes that are stored.
func (d *inflater) copy(b *block) error {
	bytes, err := d.bytes(min(d.stored, window+room-b.end))
	b.end += copy(b.data[b.end:], bytes)
	d.stored -= len(bytes)
	return err
}

// startBlock reads the header of a block.
func (d *inflater) startBlock() error {
	if err := d.ensure(); err != nil {
		return err
	}
	d.last = d.take(1) == 1
	switch d.take(2) {
	case 0:
		if err := d.align(); err != nil {
			return err
		}
		if err := d.ensure(); err != nil {
			return err
		}
		if d.stored = d.take(16); d.stored^d.take(16) != 0xffff {
			return fmt.Errorf("a block has two sizes: %w", errInvalid)
		}
		return d.align()
	case 1:
		d.coded, d.codes = true, fixed()
		return nil
	case 2:
		d.coded, d.codes = true, &d.dynamic
		return d.readCodes()
	}
	return fmt.Errorf("a block of no known type: %w", errInvalid)
}

// orderOf is the order in which the numbers of bits of orders come.
var orderOf = [...]int{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}

// readCodes reads the numbers of bits that codes have, and makes their tables.
func (d *inflater) readCodes() error {
	ofLengths, ofDistances, ofOrders := d.take(5)+257, d.take(5)+1, d.take(4)+4
	if ofLengths > 286 || ofDistances > 30 {
		return fmt.Errorf("too many symbols: %w", errInvalid)
	}
	widths := make([]uint8, len(orders))
	for _, symbol := range orderOf[:ofOrders] {
		widths[symbol] = uint8(d.take(3))
	}
	if err := orders.build(d.orders[:], orderBits, widths); err != nil {
		return err
	}
	for done := 0; done < ofLengths+ofDistances; {
		if err := d.ensure(); err != nil {
			return err
		}
		e := d.orders[d.peek(orderBits)]
		if e&special != 0 {
			return fmt.Errorf("no code: %w", errInvalid)
		}
		d.take(e.taken())
		var width uint8
		times := 1
		switch order := e.value(0); order {
		case 16:
			if done == 0 {
				return fmt.Errorf("nothing to repeat: %w", errInvalid)
			}
			width, times = d.widths[done-1], 3+d.take(2)
		case 17:
			times = 3 + d.take(3)
		case 18:
			times = 11 + d.take(7)
		default:
			width = uint8(order)
		}
		if times > ofLengths+ofDistances-done {
			return fmt.Errorf("too many symbols: %w", errInvalid)
		}
		for range times {
			d.widths[done] = width
			done++
		}
	}
	if d.widths[256] == 0 {
		return fmt.Errorf("no code for the end of a block: %w", errInvalid)
	}
	return d.dynamic.build(d.widths[:ofLengths], d.widths[ofLengths:][:ofDistances])
}

// decode decodes symbols until b is full or the block has ended.
//
// Most of a pull's CPU is spent here, and so the loop has what it needs in variables of its own, and looks at what is left of the
// input and of the room only once for several symbols.
func (d *inflater) decode(b *block) (err error) {
	next, at, to := d.next, d.at, b.end
	in, out, lengths, distances := &d.buffer, &b.data, &d.codes.lengths, &d.codes.distances
	for to < window+room {
		if at+lookahead > d.size {
			d.next, d.at = next, at
			if err = d.read(); err != nil {
				return err // what was decoded since the last time may be of zeros
			}
			at, b.end = d.at, to
		}
		var read int
		next, read = next.refilled(in[at:])
		at += read
		e := lengths[next.word&(1<<lengthBits-1)]
		for e&literal != 0 && next.count >= lengthBits+maxLength {
			out[to] = byte(e >> 16)
			to++
			next = next.drop(e.taken())
			e = lengths[next.word&(1<<lengthBits-1)]
		}
		if e&longer != 0 {
			e = lengths[e.second(next.word>>lengthBits)]
		}
		if e&literal != 0 {
			out[to] = byte(e >> 16)
			to++
			next = next.drop(e.taken())
			continue
		}
		if e&special != 0 {
			if e&end == 0 {
				err = fmt.Errorf("no code: %w", errInvalid)
			}
			next = next.drop(e.taken())
			d.coded = false
			break
		}
		length := e.value(next.word)
		next, read = next.drop(e.taken()).refilled(in[at:])
		at += read
		if e = distances[next.word&(1<<distanceBits-1)]; e&longer != 0 {
			e = distances[e.second(next.word>>distanceBits)]
		}
		distance := e.value(next.word)
		next = next.drop(e.taken())
		from, stop := to-distance, to+length
		if e&special != 0 || from < d.oldest {
			err = fmt.Errorf("it refers to what is not there: %w", errInvalid)
			break
		}
		if distance < step {
			for to < stop {
				to += copy(out[to:stop], out[from:to])
			}
			continue
		}
		for to < stop {
			binary.LittleEndian.PutUint64(out[to:], binary.LittleEndian.Uint64(out[from:]))
			to += step
			from += step
		}
		to = stop
	}
	d.next, d.at = next, at
	if over := d.over(); over != nil {
		return over
	}
	b.end = to
	return err
}
