package gunzip

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
)

// entry is what the next bits of the input stand for:
//
//	bits  0 to  5  how many bits it takes: those of a code and the extra bits behind it
//	bits  8 to 11  how many of them are the code
//	bits 16 to 31  its value: a literal, or a length or distance without its extra bits
type entry uint32

const (
	literal entry = 1 << 12
	special entry = 1 << 13 // the end of a block, a longer code, or no code at all
	end     entry = 1 << 14
	longer  entry = 1 << 15 // there is a second table: bits 16 to 31 say where it begins, bits 0 to 5 how many bits select its entries
)

// taken returns how many bits the entry takes.
func (e entry) taken() uint { return uint(e & 63) }

// value returns the literal, length or distance. The bits of the entry come next.
func (e entry) value(next uint64) int {
	return int(e>>16) + int(next&(1<<e.taken()-1)>>(e>>8&15))
}

// second returns where the entry of a longer code is. The bits that follow the first ones come next.
func (e entry) second(next uint64) int { return int(e>>16) + int(next&(1<<e.taken()-1)) }

// Codes of up to so many bits are in the first table, by all bits that may follow them.
const (
	lengthBits   = 11 // of literals and lengths
	distanceBits = 8
	orderBits    = 7 // of the lengths of codes; none is longer
)

// Sizes of tables with their second ones. One of 2^n entries has n+1 codes or more, so that there are at most 16/5 and 128/8
// entries for each symbol.
const (
	lengthEntries   = 1<<lengthBits + 288*16/5
	distanceEntries = 1<<distanceBits + 32*128/8
)

// What codes, and lengths with their extra bits, take at most.
const (
	maxCode   = 15
	maxLength = maxCode + 5
)

// tables are the tables of the codes of a block.
type tables struct {
	lengths   [lengthEntries]entry // and literals
	distances [distanceEntries]entry
}

// build makes the tables for codes of these widths.
func (t *tables) build(ofLengths, ofDistances []uint8) error {
	if err := lengths.build(t.lengths[:], lengthBits, ofLengths); err != nil {
		return err
	}
	return distances.build(t.distances[:], distanceBits, ofDistances)
}

// fixed returns the tables of the codes that are always the same (RFC 1951, 3.2.6). They are made once: making them takes 300 times
// as long as decoding the smallest block that uses them, and a blob may have nothing but such blocks.
var fixed = sync.OnceValue(func() *tables {
	t := new(tables)
	ofLengths := slices.Concat(slices.Repeat([]uint8{8}, 144), slices.Repeat([]uint8{9}, 112), slices.Repeat([]uint8{7}, 24), slices.Repeat([]uint8{8}, 8))
	_ = t.build(ofLengths, slices.Repeat([]uint8{5}, 32)) // the codes are complete
	return t
})

// alphabet has what its symbols mean, apart from their codes.
type alphabet []entry

var lengths, distances, orders = func() (lengths, distances, orders alphabet) {
	for i := range 256 {
		lengths = append(lengths, literal|entry(i)<<16)
	}
	lengths = append(lengths, special|end)
	for i, least := 0, 3; i < 28; i++ {
		extra := max(0, i/4-1)
		lengths = append(lengths, entry(least)<<16|entry(extra))
		least += 1 << extra
	}
	lengths = append(lengths, 258<<16, special, special)
	for i, least := 0, 1; i < 30; i++ {
		extra := max(0, i/2-1)
		distances = append(distances, entry(least)<<16|entry(extra))
		least += 1 << extra
	}
	distances = append(distances, special, special)
	for i := range 19 {
		orders = append(orders, entry(i)<<16)
	}
	return lengths, distances, orders
}()

// errCodes is the error of widths that no code has.
var errCodes = fmt.Errorf("there are no such codes: %w", errInvalid)

// build fills a table, whose first entries are selected by so many bits, for symbols with codes of these widths (RFC 1951, 3.2.2);
// a symbol of width 0 has none. It fails if there are no such codes or if they leave something without a meaning, except for
// a single code of one bit, as with zlib.
func (a alphabet) build(table []entry, first uint, widths []uint8) error {
	var count [maxCode + 1]uint16
	for _, width := range widths {
		count[width]++
	}
	count[0] = 0
	var next [maxCode + 2]uint16 // code by its number of bits
	free, longest := 1, uint(0)
	for width := uint(1); width <= maxCode; width++ {
		if free = free<<1 - int(count[width]); free < 0 {
			return errCodes
		}
		if count[width] > 0 {
			longest = width
		}
		next[width+1] = (next[width] + count[width]) << 1
	}
	if free > 0 && longest > 1 {
		return errCodes
	}
	primary := table[:1<<first]
	distinct := primary[:1<<min(first, longest)] // what follows it repeats it
	if free > 0 {
		for i := range distinct {
			distinct[i] = special
		}
	}
	var seconds [1 << lengthBits]uint8 // by what longer codes begin with: how many bits the longest has beyond that
	if longest > first {
		codes := next
		for _, width := range widths {
			code := codes[width]
			codes[width]++
			if uint(width) > first {
				begin := reversed(code, width) & (1<<first - 1)
				seconds[begin] = max(seconds[begin], width-uint8(first))
			}
		}
	}
	end := len(primary)
	for symbol, width := range widths {
		if width == 0 {
			continue
		}
		code := reversed(next[width], width)
		next[width]++
		means := a[symbol] + entry(width)<<8 + entry(width)
		if uint(width) <= first {
			for i := int(code); i < len(distinct); i += 1 << width {
				distinct[i] = means
			}
			continue
		}
		begin := code & (1<<first - 1)
		if seconds[begin] > 0 { // the first of them
			primary[begin] = special | longer | entry(end)<<16 | entry(seconds[begin])
			end += 1 << seconds[begin]
			seconds[begin] = 0
		}
		second := table[primary[begin]>>16:][:1<<primary[begin].taken()]
		for i := int(code >> first); i < len(second); i += 1 << (uint(width) - first) {
			second[i] = means
		}
	}
	for n := len(distinct); n < len(primary); n *= 2 {
		copy(primary[n:], primary[:n])
	}
	return nil
}

// reversed returns a code as it is in the input, which has its first bit lowest.
func reversed(code uint16, width uint8) uint16 { return bits.Reverse16(code) >> (16 - width) }
