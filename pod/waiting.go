package pod

import (
	"context"
	"sync"
	"time"
)

// waiting is what the start has begun and gives some time.
type waiting struct {
	mu  sync.Mutex
	all []<-chan struct{}
}

func (w *waiting) add(done <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, done)
}

// await tells how many have not come to an end.
func (w *waiting) await(ctx context.Context, limit time.Duration) (left int) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	w.mu.Lock()
	all := w.all
	w.mu.Unlock()
	for _, done := range all {
		select {
		case <-done:
			continue
		default:
		}
		select {
		case <-done:
		case <-ctx.Done():
			left++
		}
	}
	return left
}
