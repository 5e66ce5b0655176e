// Package backoff spaces attempts ever further apart.
package backoff

import (
	"context"
	"time"

	"github.com/crius-run/crius/internal/poll"
)

// Backoff is the pauses between the attempts of one thing. It is for one goroutine at a time.
type Backoff struct{ next, most time.Duration }

// New returns pauses of which the first is first and each other is twice the one before, up to
// most.
func New(first, most time.Duration) *Backoff { return &Backoff{next: min(first, most), most: most} }

// Next returns the pause before the next attempt.
func (b *Backoff) Next() time.Duration {
	pause := b.next
	b.next = min(2*pause, b.most)
	return pause
}

// Pause waits before the next attempt, and reports whether ctx has lasted as long.
func (b *Backoff) Pause(ctx context.Context) bool { return poll.Pause(ctx, b.Next()) }
