package progress

import (
	"testing"
	"time"
)

func TestDurationsBySize(t *testing.T) {
	var d Durations
	for size, class := range map[int64]string{0: "0-10MB", 10e6 - 1: "0-10MB", 10e6: "10MB-100MB", 999_999_999: "100MB-1GB", 1e9: "1GB-10GB", 10e9: "over 10GB", 1 << 62: "over 10GB"} {
		if got := className(size); got != class {
			t.Errorf("%d bytes are %q, want %q", size, got, class)
		}
	}
	d.Note(5, 500*time.Millisecond)
	d.Note(5, 3*time.Second)
	d.Note(2e9, 5*time.Hour)
	seen := 0
	d.BySize(func(class string, h Histogram) {
		seen++
		switch want := map[string]Histogram{"0-10MB": {Count: 2, Sum: 3500 * time.Millisecond}, "1GB-10GB": {Count: 1, Sum: 5 * time.Hour}}[class]; {
		case h.Count != want.Count || h.Sum != want.Sum || len(h.Within) != len(Bounds):
			t.Errorf("%s: %+v", class, h)
		case class == "0-10MB" && (h.Within[0.5] != 1 || h.Within[2] != 1 || h.Within[5] != 2 || h.Within[3600] != 2):
			t.Errorf("%s: %+v", class, h.Within)
		case class == "1GB-10GB" && h.Within[3600] != 0:
			t.Errorf("%s: %+v", class, h.Within)
		}
	})
	if seen != len(classes) {
		t.Errorf("%d classes", seen)
	}
}
