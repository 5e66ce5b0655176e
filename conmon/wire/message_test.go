package wire

import (
	"bytes"
	"math"
	"strings"
	"testing"
)

func TestMessages(t *testing.T) {
	for packet, want := range map[string]Message{
		"hello 1 running":            {Verb: Hello, Num: [4]uint64{1}, Text: "running"},
		"created 4711 88":            {Verb: Created, Num: [4]uint64{4711, 88}},
		"failed 1 no such file: a b": {Verb: Failed, Num: [4]uint64{1}, Text: "no such file: a b"},
		"failed 0 ":                  {Verb: Failed},
		"failed 2  two\nlines ":      {Verb: Failed, Num: [4]uint64{2}, Text: " two\nlines "},
		"exited 137 9 18446744073709551615 1": {
			Verb: Exited, Num: [4]uint64{137, 9, math.MaxUint64, 1}},
		"logged 12":           {Verb: Logged, Num: [4]uint64{12}},
		"count-log":           {Verb: CountLog},
		"ok":                  {Verb: OK},
		"error \x00\xff":      {Verb: Error, Text: "\x00\xff"},
		"dropped too slow":    {Verb: Dropped, Text: "too slow"},
		"reopen-log":          {Verb: ReopenLog},
		"resize 80 25":        {Verb: Resize, Num: [4]uint64{80, 25}},
		"close-stdin":         {Verb: CloseStdin},
		"release":             {Verb: Release},
		"start":               {Verb: Start},
		"attach stdin stdout": {Verb: Attach, Text: "stdin stdout"},
	} {
		if got := string(Append(nil, want)); got != packet {
			t.Errorf("%+v is written as %q, want %q", want, got, packet)
		}
		if got, ok := Parse([]byte(packet)); !ok || got != want {
			t.Errorf("%q is read as %+v, %v", packet, got, ok)
		}
	}
}

func TestNoMessages(t *testing.T) {
	for _, packet := range []string{
		"", " ", "ok ", " ok", "OK", "okay", "o", "ok\n", "created", "created ", "created 1", "created 1 ", "created 1 2 ",
		"created 1 2 3", "created  1 2", "created 01 2", "created +1 2", "created -1 2", "created 1 0x2", "created 1 18446744073709551616",
		"created 1 99999999999999999999999", "hello 1", "error", "failed 1", "resize 80", "\x00", "exited 1 2 3",
		"error " + strings.Repeat("x", MaxText+1), strings.Repeat("ok", MaxPacket),
	} {
		if m, ok := Parse([]byte(packet)); ok {
			t.Errorf("%.40q is read as %+v", packet, m)
		}
	}
}

// A packet with a text of any length can be parsed.
func TestLongText(t *testing.T) {
	packet := Append(nil, Message{Verb: Failed, Num: [4]uint64{math.MaxUint64}, Text: strings.Repeat("x", 100_000)})
	m, ok := Parse(packet)
	if !ok || len(packet) > MaxPacket || len(m.Text) != MaxText {
		t.Errorf("packet of %d bytes, text of %d, %v", len(packet), len(m.Text), ok)
	}
}

func TestVerbNames(t *testing.T) {
	seen := map[string]bool{"": true}
	for v := range forms {
		name := Verb(v).String()
		if seen[name] != (v == 0) {
			t.Errorf("verb %d is called %q", v, name)
		}
		seen[name] = true
	}
	if name := Verb(255).String(); name != "" {
		t.Errorf("verb 255 is called %q", name)
	}
}

// What Parse accepts is exactly what Append writes.
func FuzzParse(f *testing.F) {
	for _, packet := range []string{"hello 1 running", "created 1 2", "failed 1 x", "exited 1 2 3 4", "ok", "error x", "resize 1 2", "created 00 1"} {
		f.Add([]byte(packet))
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		m, ok := Parse(packet)
		if !ok {
			if m != (Message{}) {
				t.Errorf("%q is refused, but read as %+v", packet, m)
			}
			return
		}
		if got := Append(nil, m); !bytes.Equal(got, packet) {
			t.Errorf("%q is read as %+v, which is written as %q", packet, m, got)
		}
	})
}
