package logs

import (
	"bufio"
	"io"
	"strings"
	"testing"
)

// largest keeps everything written to it and the size of the largest write.
type largest struct {
	strings.Builder
	size int
}

func (l *largest) Write(p []byte) (int, error) {
	l.size = max(l.size, len(p))
	return l.Builder.Write(p)
}

// A line that does not end is shown as it arrives and not kept in memory.
func TestEndlessLogLine(t *testing.T) {
	t.Parallel()
	var out largest
	v := logView{out: &out, err: io.Discard, within: map[string]bool{}}
	endless := "T stdout F " + strings.Repeat("T stdout F ", longestLine/4)
	var rest []byte
	for _, look := range []string{endless, endless, " end\nT stdout F after\nT stdout F ha"} {
		var err error
		if rest, err = v.copy(bufio.NewReader(strings.NewReader(look)), rest); err != nil {
			t.Fatal(err)
		}
		if len(rest) >= longestLine {
			t.Errorf("%d bytes are kept", len(rest))
		}
	}
	if most := longestLine + 64<<10; out.size > most || cap(rest) > 2*most {
		t.Errorf("%d bytes are written at a time, and %d kept", out.size, cap(rest))
	}
	if got := out.String(); got != endless+endless+" end\nafter\n" || string(rest) != "T stdout F ha" {
		t.Errorf("%d bytes are shown, which end in %q; %.20q is left", len(got), got[max(0, len(got)-20):], rest)
	}
}
