//go:build budgets

package capture

import (
	"io"
	"strings"
	"testing"
)

// The output of many programs that print little is kept in full.
func TestBudgetLittle(t *testing.T) {
	for what, keep := range map[string]func() io.Writer{
		"head": func() io.Writer { return &Head{Max: 1 << 20} },
		"tail": func() io.Writer { return &Tail{Max: 4 << 10} },
	} {
		allocated := testing.Benchmark(func(b *testing.B) {
			for b.Loop() {
				_, _ = io.Copy(keep(), struct{ io.Reader }{strings.NewReader("little")}) // like a pipe: it implements nothing but Read
			}
		}).AllocedBytesPerOp()
		if allocated > 2<<10 {
			t.Errorf("%s: %d bytes to keep 6", what, allocated)
		}
	}
}
