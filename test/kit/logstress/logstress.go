// Package logstress generates container output in which every byte that is
// lost, doubled, moved or changed on its way into a log is detected: numbered
// lines of any length, with all byte values.
//
// Program writer, below, writes it inside a container, as fast as it can and to
// both streams at once. It counts the bytes accepted by the kernel in a file,
// which survives a SIGKILL: those bytes must be in the log.
package logstress

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
)

const (
	// MaxWrite is the most that writer writes at once.
	MaxWrite = 64 << 10
	// longest is the most that a CRI record holds of a line.
	longest = 16 << 10
	// ledgerSize is one counter for each stream.
	ledgerSize = 2 * 8
)

// filling repeats every byte except the newline.
var filling = func() []byte {
	var all []byte
	for len(all) < MaxWrite {
		for b := range 256 {
			if b != '\n' {
				all = append(all, byte(b))
			}
		}
	}
	return all
}()

const alphabet = 255

// AppendLine appends line i of stream 0 or 1. Most lines are short, some are
// about as long as a record, and a few need many records.
func AppendLine(b []byte, stream, i int) []byte {
	b = append(strconv.AppendInt(b, int64(i), 10), ':')
	fill := i * i % 97
	switch {
	case i%977 == 976:
		fill = 200_000 + i%7
	case i%61 == 60: // with the text before it, one byte less than a record, a record, one more
		fill = longest - len(strconv.Itoa(i)) - 1 + i/61%3 - 1
	case i%31 == 30:
		fill = 5000 + i%3000
	}
	for at := (i + stream*100) % alphabet; fill > 0; {
		n := min(fill, MaxWrite-alphabet)
		b = append(b, filling[at:at+n]...)
		fill -= n
		at = (at + n) % alphabet
	}
	return append(b, '\n')
}

// Ledger reads how many bytes of each stream writer has written. The file need
// not exist yet.
func Ledger(file string) (written [2]int64, err error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(b) < ledgerSize {
		return written, nil
	}
	if err != nil {
		return written, err
	}
	for i := range written {
		written[i] = int64(binary.NativeEndian.Uint64(b[8*i:]))
	}
	return written, nil
}

// Check checks a log record by record, over all of its files. The zero value is
// at the beginning.
type Check struct {
	streams [2]reading
}

// reading is the position in a stream.
type reading struct {
	want  []byte // the expected next bytes
	line  int    // the first line that is not in want
	read  int64
	ended bool // in the middle of a line, by a partial record
}

// Record takes the next record and returns what is wrong with it.
func (c *Check) Record(stream string, partial bool, content []byte) error {
	i := 0
	if stream == "stderr" {
		i = 1
	}
	r := &c.streams[i]
	if r.ended {
		return fmt.Errorf("%s goes on after byte %d, where a partial record had ended it, with %.60q", stream, r.read, content)
	}
	for len(r.want) <= len(content) {
		r.want = AppendLine(r.want, i, r.line)
		r.line++
	}
	if want := r.want[:len(content)]; !bytes.Equal(content, want) {
		at := 0
		for content[at] == want[at] {
			at++
		}
		return fmt.Errorf("byte %d of %s: %.60q, want %.60q", r.read+int64(at), stream, content[at:], want[at:])
	}
	lineEnds := r.want[len(content)] == '\n'
	if !partial && !lineEnds {
		return fmt.Errorf("byte %d of %s: a full record of %d bytes, and its line goes on", r.read, stream, len(content))
	}
	r.ended = partial && (lineEnds || len(content) != longest)
	n := len(content)
	if !partial {
		n++
	}
	r.read += int64(n)
	r.want = append(r.want[:0], r.want[n:]...)
	return nil
}

// Read returns how many bytes of each stream were found.
func (c *Check) Read() [2]int64 { return [2]int64{c.streams[0].read, c.streams[1].read} }

// End checks that everything that writer had counted is there, and no more than
// it can have written since it last counted.
func (c *Check) End(written [2]int64) error {
	for i, name := range []string{"stdout", "stderr"} {
		r := c.streams[i]
		switch {
		case r.read < written[i]:
			return fmt.Errorf("%s: %d bytes of %d are there", name, r.read, written[i])
		case r.read > written[i]+MaxWrite:
			return fmt.Errorf("%s: %d bytes are there, but only %d were written", name, r.read, written[i])
		}
	}
	return nil
}
