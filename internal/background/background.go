// Package background runs work that outlives the call that began it, and for
// which its owner waits.
package background

import (
	"context"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/panics"
)

// Group is the work of one owner.
type Group struct {
	closing context.Context
	end     context.CancelCauseFunc
	work    sync.WaitGroup
}

// New returns a group without work. End, not the end of ctx, ends the group.
func New(ctx context.Context) *Group {
	g := &Group{}
	g.closing, g.end = context.WithCancelCause(context.WithoutCancel(ctx))
	return g
}

// Closing returns a context that ends with the group. All work of the group
// must heed it.
func (g *Group) Closing() context.Context { return g.closing }

// End ends Closing with a cause.
func (g *Group) End(cause error) { g.end(cause) }

// Wait returns once no work is running.
func (g *Group) Wait() { g.work.Wait() }

// Go runs f in a goroutine for which Wait waits.
func (g *Group) Go(work string, f func()) {
	g.work.Go(func() { panics.Run(g.closing, work, f) })
}

// Insist runs f, again after a panic, until it returns normally or the group
// ends. It is for work that nothing else would do.
func (g *Group) Insist(work string, f func()) {
	const first, most = time.Second, time.Minute
	for pauses := backoff.New(first, most); ; {
		err := panics.Do(g.closing, work, func() error { f(); return nil })
		if err == nil {
			return
		}
		if !pauses.Pause(g.closing) {
			return
		}
	}
}
