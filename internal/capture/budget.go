package capture

import "sync"

// Budget is an amount of memory, in bytes, that several writers share.
type Budget struct {
	whole *Budget // nil: it is not a part

	mu    sync.Mutex
	left  int
	taken int
}

// NewBudget makes a budget of size bytes.
func NewBudget(size int) *Budget { return &Budget{left: size} }

// Part returns a budget of at most size bytes, which are also taken from the
// whole.
func (b *Budget) Part(size int) *Budget { return &Budget{whole: b, left: size} }

// Left returns how many bytes have not been taken.
func (b *Budget) Left() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left
}

// Return gives back to the whole what has been taken from this part. Nothing
// may be taken from the part afterwards.
func (b *Budget) Return() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.whole.take(-b.taken)
	b.left, b.taken = 0, 0
}

// take takes n bytes, or as many as are left.
func (b *Budget) take(n int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n = min(n, b.left)
	if b.whole != nil {
		n = b.whole.take(n)
	}
	b.left -= n
	b.taken += n
	return n
}
