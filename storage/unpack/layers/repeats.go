package layers

import (
	"fmt"
	"sync"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
)

// repeats bounds the layers of one image that repeat others. A layer that has the content of an
// earlier one needs no download, but is unpacked nevertheless. In total such layers may unpack to
// as many bytes as the earlier layers that repeat none, or to most, whichever is more.
type repeats struct {
	most int64 // bytes that are allowed in any case

	mu              sync.Mutex
	sizes           map[digest.Digest]int64 // bytes, by content that has been added
	first, repeated int64                   // bytes that were added for the first time, and again
}

func newRepeats(most int64) *repeats {
	return &repeats{most: most, sizes: map[digest.Digest]int64{}}
}

// CheckRepeat implements Target.
func (r *repeats) CheckRepeat(content digest.Digest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if most := max(r.most, r.first); r.repeated+r.sizes[content] > most {
		return fmt.Errorf("it has the content of an earlier layer, and layers that repeat others may unpack to %d bytes, in sum; rebuild the image without them: %w",
			most, fault.Invalid)
	}
	return nil
}

// added counts a layer that was added. It has bytes on the disk, holes included.
func (r *repeats) added(content digest.Digest, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, again := r.sizes[content]; again {
		r.repeated += bytes
		return
	}
	r.first += bytes
	r.sizes[content] = bytes
}
