//go:build budgets

package layers

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

// An image may have a hundred small layers.
func TestBudgetDecompression(t *testing.T) {
	blob := twoMembers(t)
	allocated := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			reader, err := decompress(bytes.NewReader(blob), nil)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, reader); errors.Join(err, reader.Close()) != nil {
				b.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	if allocated == 0 || allocated > 100<<10 {
		t.Errorf("%d bytes to decompress a few", allocated)
	}
}
