package logstress

import (
	"bytes"
	"strings"
	"testing"
)

// records returns the beginning of the output as log records.
func records(lines int) (all [][]byte) {
	for i := range lines {
		line := bytes.TrimSuffix(AppendLine(nil, 0, i), []byte("\n"))
		for ; len(line) > longest; line = line[longest:] {
			all = append(all, append([]byte("P"), line[:longest]...))
		}
		all = append(all, append([]byte("F"), line...))
	}
	return all
}

func read(c *Check, records [][]byte) error {
	for _, r := range records {
		if err := c.Record("stdout", r[0] == 'P', r[1:]); err != nil {
			return err
		}
	}
	return nil
}

func TestEveryByteValueAndLength(t *testing.T) {
	t.Parallel()
	var text []byte
	for i := range 2000 {
		text = AppendLine(text, 0, i)
	}
	for b := range 256 {
		if bytes.IndexByte(text, byte(b)) < 0 {
			t.Errorf("byte %#x never comes", b)
		}
	}
	lengths := map[int]bool{}
	for line := range bytes.Lines(text) {
		lengths[len(line)-1] = true
	}
	for _, n := range []int{longest - 1, longest, longest + 1} {
		if !lengths[n] {
			t.Errorf("no line has %d bytes", n)
		}
	}
}

// The purpose of the check: each of these must be detected.
func TestDamageIsNoticed(t *testing.T) {
	t.Parallel()
	whole := records(1000)
	size := int64(0)
	for i := range 1000 {
		size += int64(len(AppendLine(nil, 0, i)))
	}
	var c Check
	if err := read(&c, whole); err != nil {
		t.Fatal(err)
	}
	if err := c.End([2]int64{size, 0}); err != nil || c.Read() != [2]int64{size, 0} {
		t.Fatalf("%d bytes of %d, %v", c.Read()[0], size, err)
	}
	for i := range whole {
		swapped := bytes.Clone(whole[i])
		swapped[0] ^= 'F' ^ 'P'
		short := whole[i][:len(whole[i])-1]
		for what, damaged := range map[string][][]byte{
			"lost":      whole[i+1:],
			"doubled":   append([][]byte{whole[i]}, whole[i:]...),
			"other tag": append([][]byte{swapped}, whole[i+1:]...),
			"short":     append([][]byte{short}, whole[i+1:]...),
		} {
			var c Check
			err := read(&c, whole[:i])
			if err == nil {
				err = read(&c, damaged[:min(len(damaged), 30)])
			}
			if err == nil {
				err = c.End([2]int64{size, 0})
			}
			if err == nil && i < len(whole)-30 {
				t.Errorf("record %d: %s, and not noticed", i, what)
			}
		}
	}
}

func TestEnd(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		records int
		written int64
		good    bool
	}{
		"all":              {10, 1, true},
		"less":             {10, 1 << 30, false},
		"more":             {900, 1, false},
		"cut at last":      {10, 1, true},
		"full cut at last": {10, 1, false},
	} {
		all := records(1000)[:test.records]
		if last := &all[len(all)-1]; strings.HasSuffix(name, "cut at last") {
			*last = (*last)[:len(*last)-1]
			if name == "cut at last" {
				(*last)[0] = 'P'
			}
		}
		var c Check
		err := read(&c, all)
		if err == nil {
			err = c.End([2]int64{test.written, 0})
		}
		if (err == nil) != test.good {
			t.Errorf("%s: %v", name, err)
		}
	}
}
