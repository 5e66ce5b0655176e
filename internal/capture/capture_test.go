package capture

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

// io.Copy must not find a way round the bound.
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
		if got := fmt.Sprint(end); got != c.want {
			t.Errorf("%q: kept %q, want %q", c.parts, got, c.want)
		}
	}
	flood := &Tail{Max: 2000}
	if _, err := io.Copy(flood, strings.NewReader(strings.Repeat("x", 1<<20)+"the end")); err != nil || cap(flood.kept) > 8000 || !strings.HasSuffix(flood.String(), "xthe end") {
		t.Errorf("%d bytes for %d, %v", cap(flood.kept), flood.Max, err)
	}
}

// Many programs print little, and each of them is listened to.
func TestLittleCostsLittle(t *testing.T) {
	for what, keep := range map[string]func() io.Writer{
		"head": func() io.Writer { return &Head{Max: 1 << 20} },
		"tail": func() io.Writer { return &Tail{Max: 4 << 10} },
	} {
		allocated := testing.Benchmark(func(b *testing.B) {
			for b.Loop() {
				_, _ = io.Copy(keep(), struct{ io.Reader }{strings.NewReader("little")}) // as a pipe: it can do no more than be read
			}
		}).AllocedBytesPerOp()
		if allocated > 2<<10 {
			t.Errorf("%s: %d bytes to keep 6", what, allocated)
		}
	}
}
