package kubelet

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// LogRecord is one record of the CRI log format:
//
//	2016-10-06T00:17:09.669794202Z stdout P the content
type LogRecord struct {
	Time    time.Time
	Stream  string // stdout or stderr
	Partial bool   // tag P: the line continues in the stream's next record, if there is one
	Content string // without the newline that ends the record
}

// ErrUnfinished means that a log ends in the middle of a record: it is still
// being written, so that a reader may see a part, or something is lost.
var ErrUnfinished = errors.New("no complete record")

// ReadLog parses a log file and refuses any deviation from the format.
func ReadLog(file string) ([]LogRecord, error) {
	var out []LogRecord
	err := ScanLog(file, func(r LogRecord) error {
		out = append(out, r)
		return nil
	})
	return out, err
}

// ScanLog is ReadLog for a log that may be larger than memory: it calls record
// for one after the other, until record returns an error.
func ScanLog(file string, record func(LogRecord) error) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewReaderSize(f, 64<<10)
	for n := 1; ; n++ {
		line, end := in.ReadString('\n')
		if line == "" && end == io.EOF {
			return nil
		}
		if end != nil && end != io.EOF {
			return end
		}
		r, err := parseRecord(line)
		if err == nil {
			err = record(r)
		}
		if err != nil {
			return fmt.Errorf("%s, record %d: %w: %.100q", file, n, err, line)
		}
	}
}

func parseRecord(line string) (r LogRecord, err error) {
	line, ended := strings.CutSuffix(line, "\n")
	f := strings.SplitN(line, " ", 4)
	if !ended {
		return r, ErrUnfinished
	}
	if len(f) != 4 {
		return r, errors.New("no record")
	}
	if r.Time, err = time.Parse(time.RFC3339Nano, f[0]); err != nil {
		return r, err
	}
	if f[1] != "stdout" && f[1] != "stderr" {
		return r, errors.New("no such stream")
	}
	if f[2] != "P" && f[2] != "F" {
		return r, errors.New("no such tag")
	}
	r.Stream, r.Partial, r.Content = f[1], f[2] == "P", f[3]
	return r, nil
}

// Text joins the records of one stream to what the container wrote; a partial
// record adds no newline.
func Text(records []LogRecord, stream string) string {
	var out strings.Builder
	for _, r := range records {
		if r.Stream != stream {
			continue
		}
		out.WriteString(r.Content)
		if !r.Partial {
			out.WriteByte('\n')
		}
	}
	return out.String()
}
