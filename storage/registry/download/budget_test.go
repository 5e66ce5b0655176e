//go:build budgets

package download

import (
	"testing"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
)

// An image may have a hundred small layers.
func TestBudgetFetch(t *testing.T) {
	d := newDir(t)
	content := []byte("a small layer")
	info := types.BlobInfo{Digest: digest.FromBytes(content), Size: int64(len(content))}
	allocated := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			if _, err := pullOne(b.Context(), d, &fake{content: content}, info); err != nil {
				b.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	if allocated == 0 || allocated > 50<<10 {
		t.Errorf("%d bytes allocated to fetch a few", allocated)
	}
}
