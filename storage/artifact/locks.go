package artifact

import (
	"context"
	"sync"
)

// locks are one lock for each id, for which callers wait no longer than their context.
type locks struct {
	mu   sync.Mutex
	held map[string]chan struct{} // closed when the id is free
}

func (l *locks) lock(ctx context.Context, id string) (unlock func(), err error) {
	for {
		l.mu.Lock()
		if l.held == nil {
			l.held = map[string]chan struct{}{}
		}
		other, taken := l.held[id]
		if !taken {
			own := make(chan struct{})
			l.held[id] = own
			l.mu.Unlock()
			return func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				delete(l.held, id)
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
