package pod

import (
	"context"
	"sync"
	"time"
)

// waiting is work that the start of a server has begun and waits for, for a limited time.
type waiting struct {
	mu  sync.Mutex
	all []<-chan struct{}
}

func (w *waiting) add(done <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, done)
}

// await waits until all work has finished or limit is over, and returns how many pieces have
// not finished.
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
