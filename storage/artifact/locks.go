package artifact

import (
	"context"
	"sync"
)

// locks are a lock for each key. Callers wait for it no longer than their context.
type locks struct {
	mu   sync.Mutex
	held map[string]chan struct{} // closed when the key is free
}

func (l *locks) lock(ctx context.Context, key string) (unlock func(), err error) {
	for {
		l.mu.Lock()
		if l.held == nil {
			l.held = map[string]chan struct{}{}
		}
		other, taken := l.held[key]
		if !taken {
			own := make(chan struct{})
			l.held[key] = own
			l.mu.Unlock()
			return func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				delete(l.held, key)
				close(own)
			}, nil
		}
		l.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
