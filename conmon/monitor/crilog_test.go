package monitor

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

const head = "2026-01-02T03:04:05.678901234Z stdout "

// specified is what the format says of a stream, written without regard to
// cost: a record ends at a newline or, for want of one, after maxContent bytes
// if there are more. The stream's last record is partial if its line has no end.
func specified(text []byte) (records []string) {
	for line := range bytes.Lines(text) {
		content, whole := bytes.CutSuffix(line, []byte("\n"))
		for len(content) > maxContent {
			records = append(records, head+"P "+string(content[:maxContent])+"\n")
			content = content[maxContent:]
		}
		tag := "P "
		if whole {
			tag = "F "
		}
		records = append(records, head+tag+string(content)+"\n")
	}
	return records
}

// split sends text through appendRecords in pieces, by way of a log with little
// more room than one record needs.
func split(t *testing.T, text []byte, pieces func() int) []byte {
	t.Helper()
	var all, held []byte
	log := make([]byte, 0, maxRecord+100)
	for len(text) > 0 || len(held) > 0 {
		n := min(max(1, pieces()), len(text))
		held, text = append(held, text[:n]...), text[n:]
		for full := true; full; {
			var used int
			log, used, full = appendRecords(log, held, []byte(head), len(text) == 0)
			held = held[used:]
			all, log = append(all, log...), log[:0]
			if full && used == 0 && len(log) == 0 && len(all) == 0 {
				t.Fatal("a record does not fit into an empty log")
			}
		}
		if len(held) > maxContent {
			t.Fatalf("%d bytes are held back", len(held))
		}
	}
	return all
}

func TestRecords(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", maxContent)
	for name, test := range map[string]struct {
		text string
		want []string
	}{
		"nothing":            {"", nil},
		"a line":             {"a\n", []string{"F a"}},
		"lines":              {"a\nb\n", []string{"F a", "F b"}},
		"empty lines":        {"\n\n", []string{"F ", "F "}},
		"an unended line":    {"a\nb", []string{"F a", "P b"}},
		"a full line":        {long + "\n", []string{"F " + long}},
		"unended, full":      {long, []string{"P " + long}},
		"unended, over full": {long + "y", []string{"P " + long, "P y"}},
		"one byte too many":  {long + "y\n", []string{"P " + long, "F y"}},
		"three records":      {long + long + "y\nz\n", []string{"P " + long, "P " + long, "F y", "F z"}},
		"two full records":   {long + long + "\n", []string{"P " + long, "F " + long}},
		"any bytes":          {"\x00\xff\r\n\xf0\x9f", []string{"F \x00\xff\r", "P \xf0\x9f"}},
		"what looks like it": {head + "F a\n", []string{"F " + head + "F a"}},
	} {
		want := ""
		for _, record := range test.want {
			want += head + record + "\n"
		}
		for _, piece := range []int{1 << 20, 1, 7, 1000, 8192, maxContent, maxContent + 1} {
			if piece < len(test.text)/100 {
				continue
			}
			if got := split(t, []byte(test.text), func() int { return piece }); string(got) != want {
				t.Errorf("%s, %d bytes at a time: %.100q, want %.100q", name, piece, got, want)
			}
		}
	}
}

// The log is full before it would grow, and what it does not take stays.
func TestFullLog(t *testing.T) {
	t.Parallel()
	text := []byte(strings.Repeat("0123456789\n", 100))
	for room := range 500 {
		log, used, full := appendRecords(make([]byte, 0, room), text, []byte(head), false)
		fits := room / len(head+"F 0123456789\n")
		if cap(log) != room || !full || used != fits*len("0123456789\n") || len(log) != fits*len(head+"F 0123456789\n") {
			t.Fatalf("room for %d: %d bytes used, log of %d, full: %v", room, used, len(log), full)
		}
	}
}

func FuzzRecords(f *testing.F) {
	f.Add([]byte("a\nb"), uint16(0), uint64(1))
	f.Add([]byte("\n\n\n"), uint16(300), uint64(2))
	f.Add([]byte("\x00\xff"), uint16(maxContent), uint64(3))
	f.Fuzz(func(t *testing.T, text []byte, repeat uint16, seed uint64) {
		// Long lines would take the fuzzer long to find.
		if len(text) > 0 {
			text = append(bytes.Repeat(text[:1], int(repeat)), text...)
		}
		random := rand.New(rand.NewPCG(seed, 0))
		got := split(t, text, func() int { return random.IntN(1 << random.IntN(16)) })
		if want := strings.Join(specified(text), ""); string(got) != want {
			t.Errorf("%d bytes of records, want %d", len(got), len(want))
		}
		// What was split can be joined.
		var joined []byte
		for record := range bytes.Lines(got) {
			content := record[len(head)+2 : len(record)-1]
			joined = append(joined, content...)
			if record[len(head)] == 'F' {
				joined = append(joined, '\n')
			}
		}
		if !bytes.Equal(joined, text) {
			t.Errorf("joined to %d bytes, want %d", len(joined), len(text))
		}
	})
}

func FuzzIndexNewline(f *testing.F) {
	f.Add([]byte("0123456\n"))
	f.Add([]byte("\x0b\x8a\x0a"))
	f.Add([]byte("\x09\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for i := range min(len(b), 9) {
			if got, want := indexNewline(b[i:]), bytes.IndexByte(b[i:], '\n'); got != want {
				t.Errorf("%q: %d, want %d", b[i:], got, want)
			}
		}
	})
}

func TestHead(t *testing.T) {
	t.Parallel()
	before := time.Now()
	got := string(appendHead(nil, "stderr"))
	stamp, rest, _ := strings.Cut(got, " ")
	at, err := time.Parse(time.RFC3339Nano, stamp)
	if err != nil || at.Before(before.Truncate(0)) || at.After(time.Now()) || rest != "stderr " {
		t.Errorf("%q, %v", got, err)
	}
	if len(got)+len("F \n")+maxContent != maxRecord {
		t.Errorf("a record may have %d bytes", len(got)+len("F \n")+maxContent)
	}
}

func BenchmarkRecords(b *testing.B) {
	for _, size := range []int{10, 100, 1000, 40_000} {
		b.Run(fmt.Sprintf("line=%d", size), func(b *testing.B) {
			text := []byte(strings.Repeat(strings.Repeat("x", size-1)+"\n", 1+bufferSize/size))[:bufferSize]
			log := make([]byte, 0, bufferSize)
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				for rest := text; ; {
					var used int
					var full bool
					if _, used, full = appendRecords(log, rest, []byte(head), true); !full {
						break
					}
					rest = rest[used:]
				}
			}
		})
	}
}
