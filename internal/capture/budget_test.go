//go:build budgets

package capture

import (
	"io"
	"strings"
	"testing"
)

// Many programs print little, and each of them is listened to.
func TestBudgetLittle(t *testing.T) {
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
