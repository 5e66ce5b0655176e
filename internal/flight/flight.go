// Package flight lets work outlive its caller.
//
// A kubelet that runs into its own time limit gives up waiting and asks again;
// it does not mean that the work should stop. Do therefore runs each piece of
// work under a key, on a context of its own. Whoever asks for the same key
// while it runs joins it and gets the same result; whoever stops waiting
// changes nothing for the others or for the work.
package flight

import (
	"context"
	"sync"

	"github.com/crius-run/crius/internal/panics"
)

// Group is a set of running works, by key. The zero value is ready.
type Group[K comparable, V any] struct {
	mu      sync.Mutex
	running map[K]*call[V]
	all     sync.WaitGroup
}

type call[V any] struct {
	done  chan struct{}
	value V
	err   error
}

// Do starts work under key, or joins the one already running, and waits for its
// end or the caller's. Work gets the values of the first caller's context but
// neither its deadline nor its cancellation: it sets its own limits.
// A panic in work becomes its error (fault.Internal), so that one bad request
// cannot take the node's runtime down.
func (g *Group[K, V]) Do(ctx context.Context, key K, work func(context.Context) (V, error)) (V, error) {
	g.mu.Lock()
	c, ok := g.running[key]
	if !ok {
		c = &call[V]{done: make(chan struct{})}
		if g.running == nil {
			g.running = make(map[K]*call[V])
		}
		g.running[key] = c
		g.all.Add(1)
		go g.run(context.WithoutCancel(ctx), key, c, work)
	}
	g.mu.Unlock()

	select {
	case <-c.done:
		return c.value, c.err
	case <-ctx.Done():
		var none V
		return none, context.Cause(ctx)
	}
}

func (g *Group[K, V]) run(ctx context.Context, key K, c *call[V], work func(context.Context) (V, error)) {
	defer g.all.Done()
	defer func() {
		g.mu.Lock()
		delete(g.running, key)
		g.mu.Unlock()
		close(c.done)
	}()
	defer panics.Recover(ctx, "work under way", &c.err)
	c.value, c.err = work(ctx)
}

// Wait returns when no work runs any more, or when ctx ends. The caller must
// see to it that none is started meanwhile.
func (g *Group[K, V]) Wait(ctx context.Context) error {
	idle := make(chan struct{})
	go func() {
		g.all.Wait()
		close(idle)
	}()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
