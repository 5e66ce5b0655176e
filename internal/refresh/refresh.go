// Package refresh keeps an answer up to date in the background.
//
// It is for an answer that takes time to find, or whose source may hang. A
// periodic look finds the answer. Readers get the result of the last look
// without waiting; a reader that needs the present answer requests a look.
package refresh

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Value is an answer that Run keeps up to date.
type Value[T any] struct {
	look func(context.Context) T
	last atomic.Pointer[T]
	wake chan struct{} // has an item while an early look is requested

	mu   sync.Mutex
	next chan struct{} // closed when the look that begins next has ended
}

// New returns a value that look finds. It has no answer before Run.
func New[T any](look func(context.Context) T) *Value[T] {
	return &Value[T]{look: look, wake: make(chan struct{}, 1), next: make(chan struct{})}
}

// Run looks at once, a period after the end of each look, and when Fresh
// requests it, until ctx ends. Only one Run may be active.
func (v *Value[T]) Run(ctx context.Context, period time.Duration) {
	timer := time.NewTimer(period)
	defer timer.Stop()
	for ctx.Err() == nil {
		v.mu.Lock()
		done := v.next
		v.next = make(chan struct{})
		select {
		case <-v.wake: // requests so far are for the look that begins here
		default:
		}
		v.mu.Unlock()
		found := v.look(ctx)
		v.last.Store(&found)
		close(done)
		timer.Reset(period)
		select {
		case <-v.wake:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

// Last returns the answer of the last look; nil before the first one has ended.
// Readers share it and must not modify anything reachable from it. Each look
// has a new pointer.
func (v *Value[T]) Last() *T { return v.last.Load() }

// Fresh returns Last once a look that begins after this call has ended, or when
// ctx ends.
func (v *Value[T]) Fresh(ctx context.Context) *T {
	v.mu.Lock()
	done := v.next
	select {
	case v.wake <- struct{}{}:
	default:
	}
	v.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
	}
	return v.last.Load()
}
