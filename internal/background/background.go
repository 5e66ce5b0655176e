// Package background runs work that does not end with the call that began it, and
// that its owner waits for.
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

// New makes a group without work. The end of ctx is not that of the group: End is.
func New(ctx context.Context) *Group {
	g := &Group{}
	g.closing, g.end = context.WithCancelCause(context.WithoutCancel(ctx))
	return g
}

// Closing ends with the group, which all of its work heeds.
func (g *Group) Closing() context.Context { return g.closing }

// End ends Closing with a cause.
func (g *Group) End(cause error) { g.end(cause) }

// Wait returns when no work is under way any more.
func (g *Group) Wait() { g.work.Wait() }

// Go runs f, which Wait waits for.
func (g *Group) Go(work string, f func()) {
	g.work.Go(func() { panics.Run(g.closing, work, f) })
}

// Insist runs f until it returns without a panic, or the group ends. It is for work
// that nothing else would do.
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
