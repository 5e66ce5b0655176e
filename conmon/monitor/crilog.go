package monitor

import "github.com/crius-run/crius/conmon/wire"

// The CRI log format, as the kubelet reads it: one record a line,
//
//	2026-01-02T03:04:05.678901234Z stdout F content
//
// where P instead of F says that the record has no newline: its line goes on in
// the next record of the same stream, or the stream ends in it.
const (
	// maxContent bounds the content of a record; a longer line takes several.
	maxContent = 16 << 10
	maxRecord  = wire.StampLen + len(" stdout F \n") + maxContent
)

// appendHead appends what all records of one read have in common.
func appendHead(b []byte, stream string) []byte {
	sec, nsec := now()
	b = append(wire.AppendStamp(b, sec, nsec), ' ')
	b = append(b, stream...)
	return append(b, ' ')
}

// appendRecords turns the beginning of a stream's bytes into records behind
// head. It stops where log has no room (full), or where the rest of in is a
// line whose end is still to come; eof says that it will never come. How the
// stream is split depends on its bytes alone, never on the reads they came in:
// a record ends at a newline, or when its line is seen to be longer than
// maxContent.
func appendRecords(log, in, head []byte, eof bool) (out []byte, used int, full bool) {
	for {
		rest := in[used:]
		end := indexNewline(rest[:min(len(rest), maxContent+1)])
		tag, size, skip := byte('F'), end, end+1
		switch {
		case end >= 0:
		case len(rest) > maxContent:
			tag, size, skip = 'P', maxContent, maxContent
		case eof && len(rest) > 0:
			tag, size, skip = 'P', len(rest), len(rest)
		default:
			return log, used, false
		}
		if len(log)+len(head)+size+3 > cap(log) {
			return log, used, true
		}
		log = append(append(log, head...), tag, ' ')
		log = append(append(log, rest[:size]...), '\n')
		used += skip
	}
}

// indexNewline looks at eight bytes at a time. (bytes.IndexByte is faster still
// and costs, by what package bytes imports, 17 KiB per container.)
func indexNewline(b []byte) int {
	const (
		ones     = 0x0101010101010101
		tops     = 0x8080808080808080
		newlines = '\n' * ones
	)
	i := 0
	for ; i+8 <= len(b); i += 8 {
		w := b[i : i+8 : i+8]
		x := uint64(w[0]) | uint64(w[1])<<8 | uint64(w[2])<<16 | uint64(w[3])<<24 |
			uint64(w[4])<<32 | uint64(w[5])<<40 | uint64(w[6])<<48 | uint64(w[7])<<56
		x ^= newlines
		if (x-ones)&^x&tops != 0 { // some byte of x is zero
			break
		}
	}
	for ; i < len(b); i++ {
		if b[i] == '\n' {
			return i
		}
	}
	return -1
}
