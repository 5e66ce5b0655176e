package capture

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

// io.Copy must not bypass the bound.
func TestHead(t *testing.T) {
	t.Parallel()
	flood := strings.Repeat("0123456789", 1<<17)
	h := &Head{Max: 15}
	n, err := io.Copy(h, strings.NewReader(flood))
	if int(n) != len(flood) || err != nil || string(h.Bytes()) != "012345678901234" {
		t.Errorf("copied %d, kept %q, %v", n, h.Bytes(), err)
	}
	calls, enough := 0, errors.New("enough")
	h = &Head{Max: 5000, Full: func() error { calls++; return enough }}
	_, err = io.Copy(h, strings.NewReader(flood))
	if !errors.Is(err, enough) || calls != 1 || string(h.Bytes()) != flood[:5000] {
		t.Errorf("%d calls, kept %d bytes, %v", calls, len(h.Bytes()), err)
	}
	h = &Head{Max: 3, Full: func() error { return enough }}
	for _, part := range []string{"", "ab", "c"} {
		if n, err := h.Write([]byte(part)); n != len(part) || err != nil {
			t.Errorf("%q: %d, %v", part, n, err)
		}
	}
	if string(h.Bytes()) != "abc" {
		t.Errorf("kept %q", h.Bytes())
	}
}

// What writers share is never exceeded, what is kept has no gap, and everything
// is returned.
func TestBudget(t *testing.T) {
	t.Parallel()
	const size, limit = 100, 70
	whole := NewBudget(size)
	part := whole.Part(limit)
	first, second := &Head{Max: 1000, Budget: part, Free: 10}, &Head{Max: 1000, Budget: part, Free: 10}
	other := &Head{Max: 1000, Budget: whole.Part(limit), Free: 10}
	steps := []struct {
		head            *Head
		add, kept, left int
	}{
		{first, 8, 8, 100},   // free
		{first, 4, 12, 98},   // two of them are not
		{second, 48, 48, 60}, // of the same part
		{first, 40, 42, 30},  // which is used up
		{second, 1, 48, 30},
		{other, 9, 9, 30}, // another one has its own free bytes
		{other, 40, 40, 0},
		{other, 1, 40, 0},
	}
	for i, step := range steps {
		if n, err := step.head.Write(make([]byte, step.add)); n != step.add || err != nil {
			t.Errorf("step %d: took %d, %v", i, n, err)
		}
		if kept := len(step.head.Bytes()); kept != step.kept || whole.Left() != step.left {
			t.Errorf("step %d: kept %d, want %d; left %d, want %d", i, kept, step.kept, whole.Left(), step.left)
		}
	}
	part.Return()
	other.Budget.Return()
	if whole.Left() != size {
		t.Errorf("%d of %d came back", whole.Left(), size)
	}
	for _, h := range []*Head{first, other} {
		if h.Write([]byte("x")); len(h.Bytes()) > 42 {
			t.Error("kept more after a gap")
		}
	}
}

func TestTail(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		parts []string
		want  string
	}{
		{nil, ""},
		{[]string{"abc"}, "abc"},
		{[]string{"ab", "cdefgh", "", "\xff"}, "efgh\uFFFD"},
		{[]string{"0123456789"}, "56789"},
		{[]string{"abcdef", " g\n"}, "ef g"},
	} {
		end := &Tail{Max: 5}
		for _, part := range c.parts {
			if n, err := io.Copy(end, strings.NewReader(part)); int(n) != len(part) || err != nil {
				t.Errorf("%q: %d, %v", part, n, err)
			}
		}
		if begin := strings.Join(c.parts, ""); end.Begin() != begin {
			t.Errorf("%q: begins with %q", c.parts, end.Begin())
		}
		if got := fmt.Sprint(end); got != c.want {
			t.Errorf("%q: kept %q, want %q", c.parts, got, c.want)
		}
	}
	flood := &Tail{Max: 2000}
	if _, err := io.Copy(flood, strings.NewReader(strings.Repeat("x", 1<<20)+"the end")); err != nil || len(flood.Begin()) != maxBegin || cap(flood.kept) > 8000 || !strings.HasSuffix(flood.String(), "xthe end") {
		t.Errorf("%d bytes for %d, %v", cap(flood.kept), flood.Max, err)
	}
}
