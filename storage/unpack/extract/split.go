package extract

import (
	"bufio"
	"encoding/json"

	tarsplit "github.com/vbatts/tar-split/tar/storage"
)

// splitter writes tar-split data. tar-split's own packer keeps all names in memory, to refuse
// archives with a path twice: where these are rebuilt, the contents of their files differ.
type splitter struct {
	buffer   *bufio.Writer
	to       *json.Encoder
	position int
}

func newSplitter(buffer *bufio.Writer) *splitter {
	return &splitter{buffer: buffer, to: json.NewEncoder(buffer)}
}

// segment adds bytes that no file has.
func (s *splitter) segment(raw []byte) error {
	if len(raw) == 0 {
		return nil
	}
	return s.add(tarsplit.Entry{Type: tarsplit.SegmentType, Payload: raw})
}

// file adds the content of a file.
func (s *splitter) file(name string, size int64, sum checksum) error {
	e := tarsplit.Entry{Type: tarsplit.FileType, Size: size}
	if size > 0 {
		e.Payload = sum.bytes()
	}
	e.SetName(name)
	return s.add(e)
}

func (s *splitter) add(e tarsplit.Entry) error {
	e.Position = s.position
	s.position++
	return s.to.Encode(e)
}

func (s *splitter) flush() error { return s.buffer.Flush() }
