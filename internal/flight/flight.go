// Package flight lets work outlive its caller.
//
// A kubelet that reaches its own time limit stops waiting and asks again; it
// does not mean that the work should stop. Do therefore runs each piece of work
// under a key, on its own context. A caller with the same key joins the running
// work and gets the same result; a caller that stops waiting affects neither
// the others nor the work.
package flight

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/panics"
)

// Group is a set of running works, by key. The zero value is ready, and runs
// all work to its end.
type Group[K comparable, V any] struct {
	// Patience is how long work continues without a waiting caller; 0: to its
	// end.
	Patience time.Duration
	// MostAbandoned is the maximum number of works without a waiting caller;
	// beyond it the oldest is cancelled early. 0: any number.
	MostAbandoned int

	mu        sync.Mutex
	running   map[K]*call[V]
	abandoned []*call[V] // the oldest first
	all       sync.WaitGroup
	ending    bool // Wait was called
}

// ErrAbandoned is the cause of work cancelled because no caller waited for it.
var ErrAbandoned = errors.New("cancelled: no caller waits for it any more")

type call[V any] struct {
	done  chan struct{}
	value V
	err   error

	end     context.CancelCauseFunc
	waiting int
	came    chan struct{} // closed when a caller joins, and by Wait
	timer   *time.Timer   // set while no caller waits
	over    bool          // it was cancelled
}

type awaitKey struct{}

// Do starts work under key, or joins the running one, and waits for its end or
// the caller's. Work gets the values of the first caller's context but neither
// its deadline nor its cancellation: it sets its own limits, besides those of
// the group. A panic in work becomes its error (fault.Internal), so that one
// bad request cannot take the node's runtime down.
func (g *Group[K, V]) Do(ctx context.Context, key K, work func(context.Context) (V, error)) (V, error) {
	for {
		c := g.join(ctx, key, work)
		value, err := g.wait(ctx, c)
		if err == nil || ctx.Err() != nil || !g.wasCalledOff(c) {
			return value, err
		} // otherwise it ended before this caller came
	}
}

func (g *Group[K, V]) wait(ctx context.Context, c *call[V]) (V, error) {
	defer g.leave(c)
	select {
	case <-c.done:
		return c.value, c.err
	case <-ctx.Done():
		var none V
		return none, context.Cause(ctx)
	}
}

func (g *Group[K, V]) join(ctx context.Context, key K, work func(context.Context) (V, error)) *call[V] {
	g.mu.Lock()
	defer g.mu.Unlock()
	c, ok := g.running[key]
	if !ok {
		c = &call[V]{done: make(chan struct{}), came: make(chan struct{})}
		ctx, c.end = context.WithCancelCause(context.WithoutCancel(ctx))
		ctx = context.WithValue(ctx, awaitKey{}, func(ctx context.Context) { g.await(ctx, c) })
		if g.running == nil {
			g.running = make(map[K]*call[V])
		}
		g.running[key] = c
		g.all.Add(1)
		go g.run(ctx, key, c, work)
	}
	c.waiting++
	c.tell()
	g.forget(c)
	return c
}

// tell is called with the lock held.
func (c *call[V]) tell() {
	close(c.came)
	c.came = make(chan struct{})
}

// Await returns, in work, when a caller waits for its result: at once, or when one joins. Without a
// caller it also returns at the end of ctx, which must come from the work's, and if Wait is called:
// then none may come.
func Await(ctx context.Context) {
	if await, ok := ctx.Value(awaitKey{}).(func(context.Context)); ok {
		await(ctx)
	}
}

func (g *Group[K, V]) await(ctx context.Context, c *call[V]) {
	for {
		g.mu.Lock()
		ready, came := c.waiting > 0 || g.ending, c.came
		g.mu.Unlock()
		if ready {
			return
		}
		select {
		case <-came:
		case <-ctx.Done():
			return
		}
	}
}

// leave cancels work at once if too much is abandoned, otherwise later unless a
// caller joins it.
func (g *Group[K, V]) leave(c *call[V]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	c.waiting--
	select {
	case <-c.done:
		return
	default:
	}
	if c.waiting > 0 || g.Patience == 0 {
		return
	}
	c.timer = time.AfterFunc(g.Patience, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if c.waiting == 0 {
			g.callOff(c)
		}
	})
	if g.abandoned = append(g.abandoned, c); g.MostAbandoned > 0 && len(g.abandoned) > g.MostAbandoned {
		g.callOff(g.abandoned[0])
	}
}

// callOff and forget are called with the lock held.
func (g *Group[K, V]) callOff(c *call[V]) {
	g.forget(c)
	c.over = true
	c.end(ErrAbandoned)
}

func (g *Group[K, V]) wasCalledOff(c *call[V]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return c.over
}

// forget removes a call from the list of those without a waiting caller.
func (g *Group[K, V]) forget(c *call[V]) {
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
		g.abandoned = slices.DeleteFunc(g.abandoned, func(a *call[V]) bool { return a == c })
	}
}

func (g *Group[K, V]) run(ctx context.Context, key K, c *call[V], work func(context.Context) (V, error)) {
	defer g.all.Done()
	defer func() {
		g.mu.Lock()
		delete(g.running, key)
		close(c.done)
		g.forget(c)
		g.mu.Unlock()
		c.end(nil)
	}()
	defer panics.Recover(ctx, "shared operation", &c.err)
	c.value, c.err = work(ctx)
}

// Running returns a channel that is closed when the work under key ends; nil: none is running.
func (g *Group[K, V]) Running(key K) <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c, ok := g.running[key]; ok {
		return c.done
	}
	return nil
}

// Wait returns when no work is running, or when ctx ends. The caller must
// ensure that none is started meanwhile.
func (g *Group[K, V]) Wait(ctx context.Context) error {
	g.mu.Lock()
	g.ending = true
	for _, c := range g.running {
		c.tell()
	}
	g.mu.Unlock()
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
