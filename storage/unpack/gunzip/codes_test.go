package gunzip

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// header is that of a member, without a name.
const header = "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"

// bitWriter writes DEFLATE bit by bit.
type bitWriter struct {
	bytes []byte
	count uint // of bits
}

// put writes the lowest n bits, the lowest first.
func (w *bitWriter) put(bits, n uint) {
	for i := range n {
		if w.count%8 == 0 {
			w.bytes = append(w.bytes, 0)
		}
		w.bytes[w.count/8] |= byte(bits>>i&1) << (w.count % 8)
		w.count++
	}
}

// stored writes a block of bytes that are stored.
func (w *bitWriter) stored(content []byte) {
	w.put(0, 3)
	w.count = uint(len(w.bytes)) * 8
	w.put(uint(len(content)), 16)
	w.put(^uint(len(content)), 16)
	w.bytes = append(w.bytes, content...)
	w.count += uint(len(content)) * 8
}

// randomWidths returns the widths of a random complete code for some symbols, of at most longest bits. A deep one has few short codes.
func randomWidths(random *rand.Rand, symbols, used int, longest uint8, deep bool) []uint8 {
	leaves := []uint8{0}
	for len(leaves) < used {
		at := random.IntN(len(leaves))
		if deep {
			at = len(leaves) - 1
		}
		for leaves[at] == longest {
			at = (at + len(leaves) - 1) % len(leaves)
		}
		leaves[at]++
		leaves = slices.Insert(leaves, at, leaves[at])
	}
	widths := make([]uint8, symbols)
	for i, at := range random.Perm(symbols)[:used] {
		widths[at] = max(1, leaves[i])
	}
	return widths
}

// codes returns codes of these widths as they are written.
func codes(widths []uint8) []uint {
	codes := make([]uint, len(widths))
	code := uint16(0)
	for width := uint8(1); width <= maxCode; width++ {
		code <<= 1
		for symbol := range widths {
			if widths[symbol] == width {
				codes[symbol] = uint(reversed(code, width))
				code++
			}
		}
	}
	return codes
}

// dynamic writes the header of the last block, with codes of these widths, and repeats them where it can.
func (w *bitWriter) dynamic(ofLengths, ofDistances []uint8) {
	orderWidths := slices.Repeat([]uint8{4}, 19) // 13 of 4 bits and 6 of 5 are complete
	for i := 13; i < 19; i++ {
		orderWidths[i] = 5
	}
	orderCodes := codes(orderWidths)
	w.put(1, 1)
	w.put(2, 2)
	w.put(uint(len(ofLengths)-257), 5)
	w.put(uint(len(ofDistances)-1), 5)
	w.put(19-4, 4)
	for _, order := range orderOf {
		w.put(uint(orderWidths[order]), 3)
	}
	order := func(order int) { w.put(orderCodes[order], uint(orderWidths[order])) }
	widths := slices.Concat(ofLengths, ofDistances)
	for i := 0; i < len(widths); {
		same := 1
		for i+same < len(widths) && widths[i+same] == widths[i] {
			same++
		}
		switch {
		case widths[i] == 0 && same >= 11:
			same = min(same, 138)
			order(18)
			w.put(uint(same-11), 7)
		case widths[i] == 0 && same >= 3:
			order(17)
			w.put(uint(same-3), 3)
		case same >= 4:
			same = min(same, 7)
			order(int(widths[i]))
			order(16)
			w.put(uint(same-4), 2)
		default:
			same = 1
			order(int(widths[i]))
		}
		i += same
	}
}

// randomBlock returns DEFLATE of noise and of a block with random codes and random symbols.
func randomBlock(random *rand.Rand, noise []byte) []byte {
	w := new(bitWriter)
	w.stored(noise[:window]) // for all distances
	symbols := 257 + random.IntN(30)
	ofLengths := randomWidths(random, symbols, 2+random.IntN(symbols-1), 1+maxCode-uint8(1+random.IntN(6)), random.IntN(2) == 0)
	if ofLengths[256] == 0 {
		at := slices.IndexFunc(ofLengths, func(width uint8) bool { return width > 0 })
		ofLengths[256], ofLengths[at] = ofLengths[at], 0
	}
	symbols = 1 + random.IntN(30)
	ofDistances := randomWidths(random, symbols, 1+random.IntN(symbols), 5+uint8(random.IntN(11)), random.IntN(2) == 0)
	w.dynamic(ofLengths, ofDistances)
	lengthCodes, distanceCodes := codes(ofLengths), codes(ofDistances)
	for range random.IntN(3000) {
		symbol := random.IntN(len(ofLengths))
		if random.IntN(2) == 0 {
			symbol = min(len(ofLengths)-1, 257+random.IntN(30))
		}
		if symbol == 256 || ofLengths[symbol] == 0 {
			continue
		}
		if symbol < 256 {
			w.put(lengthCodes[symbol], uint(ofLengths[symbol]))
			continue
		}
		distance := random.IntN(len(ofDistances))
		if ofDistances[distance] == 0 {
			continue
		}
		w.put(lengthCodes[symbol], uint(ofLengths[symbol]))
		w.put(uint(random.Uint32()), lengths[symbol].taken())
		w.put(distanceCodes[distance], uint(ofDistances[distance]))
		w.put(uint(random.Uint32()), distances[distance].taken())
	}
	w.put(lengthCodes[256], uint(ofLengths[256]))
	return w.bytes
}

// Codes of all widths are decoded as by Go, and what they become when a bit has changed or the end is missing.
func TestRandomCodes(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(3, 4))
	noise := contents()["noise"]
	for range 40 {
		data := append(randomBlock(random, noise), "behind"...)
		content := likeGo(t, data)
		at := 3 + 4 + window + random.IntN(60)
		if random.IntN(2) == 0 {
			at = len(data) - 1 - random.IntN(len(data)-window-5)
		}
		at = min(at, len(data)-1)
		if got := likeGo(t, data[:at]); !bytes.HasPrefix(content, got) {
			t.Errorf("%d bytes of %d are not the first ones of the content", len(got), at)
		}
		data[at] ^= 1 << random.IntN(8)
		likeGo(t, data)
	}
}

// fixedMatch writes a last block of fixed codes: the longest match, at the longest distance.
func (w *bitWriter) fixedMatch() {
	w.put(1, 1)
	w.put(1, 2)
	w.put(uint(reversed(0b11000101, 8)), 8)
	w.put(uint(reversed(29, 5)), 5)
	w.put(1<<13-1, 13)
	w.put(0, 7)
}

// A match is copied wherever blocks of the output end.
func TestMatchAcrossBlocks(t *testing.T) {
	t.Parallel()
	noise := contents()["noise"]
	for _, end := range []int{0, 1, 2, 3, 7, 8, 9, 10, 100, 257, 258, 259, 260} {
		content := noise[:window+room+1-end]
		w := new(bitWriter)
		for part := range slices.Chunk(content, 1<<16-1) {
			w.stored(part)
		}
		w.fixedMatch()
		content = append(slices.Clip(content), content[len(content)-window:][:maxMatch]...)
		w.bytes = binary.LittleEndian.AppendUint32(w.bytes, crc32.ChecksumIEEE(content))
		w.bytes = binary.LittleEndian.AppendUint32(w.bytes, uint32(len(content)))
		if got, err := read(t, strings.NewReader(header+string(w.bytes))); err != nil || !bytes.Equal(got, content) {
			t.Errorf("match %d bytes in front of the end: %d bytes, %v", end-1, len(got), err)
		}
	}
}

// A match does not lead to the member before, also if the output's block has changed since.
func TestMatchAcrossMembers(t *testing.T) {
	t.Parallel()
	noise := contents()["noise"]
	for _, size := range []int{1, 200, window - 1} {
		w := new(bitWriter)
		w.stored(noise[:size])
		w.fixedMatch()
		blob := string(packed(t, gzip.NoCompression, noise[:window+room-min(size, 100)])) + header + string(w.bytes)
		if got, err := read(t, strings.NewReader(blob)); !errors.Is(err, errInvalid) {
			t.Errorf("%d bytes in front of the match: %d bytes, %v", size, len(got), err)
		}
	}
}

// Codes that have no meaning are refused, as by Go.
func TestInvalidCodes(t *testing.T) {
	t.Parallel()
	widths := func(symbols int, of map[int]uint8) []uint8 {
		widths := make([]uint8, symbols)
		for symbol, width := range of {
			widths[symbol] = width
		}
		return widths
	}
	fixed := func(code uint16, distance uint16) func(*bitWriter) {
		return func(w *bitWriter) {
			w.put(1, 1)
			w.put(1, 2)
			w.put(uint(reversed(0x30, 8)), 8) // the literal 0
			w.put(uint(reversed(code, 8)), 8)
			w.put(uint(reversed(distance, 5)), 5)
		}
	}
	match := map[int]uint8{0: 1, 256: 2, 257: 2}
	for name, write := range map[string]func(*bitWriter){
		"fixed length 286":   fixed(0b11000110, 0),
		"fixed length 287":   fixed(0b11000111, 0),
		"fixed distance 30":  fixed(0b11000101, 30),
		"fixed distance 31":  fixed(0b11000101, 31),
		"287 lengths":        func(w *bitWriter) { w.dynamic(widths(287, match), []uint8{1}) },
		"31 distances":       func(w *bitWriter) { w.dynamic(widths(258, match), widths(31, map[int]uint8{0: 1})) },
		"no end":             func(w *bitWriter) { w.dynamic(widths(257, map[int]uint8{0: 1, 1: 1}), []uint8{1}) },
		"not the end":        func(w *bitWriter) { w.dynamic(widths(257, map[int]uint8{256: 1}), []uint8{1}); w.put(1, 1) },
		"no distances":       func(w *bitWriter) { w.dynamic(widths(258, match), []uint8{0}); w.put(0b110, 3) },
		"not the distance":   func(w *bitWriter) { w.dynamic(widths(258, match), []uint8{1}); w.put(0b1110, 4) },
		"too few lengths":    func(w *bitWriter) { w.dynamic(widths(258, map[int]uint8{0: 1, 256: 3}), []uint8{1}) },
		"too many lengths":   func(w *bitWriter) { w.dynamic(widths(258, map[int]uint8{0: 1, 1: 1, 256: 1}), []uint8{1}) },
		"too few distances":  func(w *bitWriter) { w.dynamic(widths(258, match), []uint8{2}) },
		"too many distances": func(w *bitWriter) { w.dynamic(widths(258, match), []uint8{1, 1, 1}) },
	} {
		w := new(bitWriter)
		write(w)
		w.bytes = append(w.bytes, make([]byte, 2*lookahead)...)
		likeGo(t, w.bytes)
		if got, err := read(t, strings.NewReader(header+string(w.bytes))); !errors.Is(err, errInvalid) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

// What is decoded of the zeros that follow the input is not returned.
func TestTruncatedInLiteral(t *testing.T) {
	t.Parallel()
	const literal = 149 // of nine bits
	w := new(bitWriter)
	w.put(1, 1)
	w.put(1, 2)
	for range 16 {
		w.put(uint(reversed(0b110010000+literal-144, 9)), 9)
	}
	for size := range w.bytes {
		got, err := read(t, strings.NewReader(header+string(w.bytes[:size])))
		if !errors.Is(err, io.ErrUnexpectedEOF) || bytes.Count(got, []byte{literal}) != len(got) {
			t.Errorf("%d bytes: %v, %v", size, got, err)
		}
	}
}

// The tables of fixed codes are not made for each block: a blob of 1 MiB may have 800,000 of them.
func TestFixedTablesAreMadeOnce(t *testing.T) {
	t.Parallel()
	const emptyFixed = "\x03\x00"
	var d inflater
	d.start(strings.NewReader(emptyFixed))
	before := *fixed()
	if ended, err := d.inflate(new(block)); !ended || err != nil || d.codes != fixed() || *fixed() != before || d.dynamic != (tables{}) {
		t.Errorf("%t, %v", ended, err)
	}
}
