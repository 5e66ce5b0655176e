package oci

import (
	"context"
	"fmt"

	"golang.org/x/sync/semaphore"

	"github.com/crius-run/crius/internal/fault"
)

// gate keeps commands of a container from being started or killed during a checkpoint. criu
// fails if a process dies that it holds, and may then take the container with it; and a command
// that is frozen while the runtime starts it would be killed when its time is up.
type gate struct{ free *semaphore.Weighted }

const wholeGate = 1 << 40 // more than there are commands

func newGate() gate { return gate{semaphore.NewWeighted(wholeGate)} }

// enter waits for the end of a checkpoint. leave must be called afterwards.
func (g gate) enter(ctx context.Context) (leave func(), err error) {
	if g.free.Acquire(ctx, 1) != nil {
		return nil, fmt.Errorf("the container is being checkpointed, try again later: %w", fault.Unavailable)
	}
	return func() { g.free.Release(1) }, nil
}

// soon calls f, now if there is no checkpoint, otherwise after its end without being waited for.
func (g gate) soon(ctx context.Context, f func(context.Context)) {
	if g.free.TryAcquire(1) {
		defer g.free.Release(1)
		f(ctx)
		return
	}
	ctx = context.WithoutCancel(ctx)
	go func() {
		_ = g.free.Acquire(ctx, 1) // a checkpoint ends
		defer g.free.Release(1)
		f(ctx)
	}()
}

// shut waits until nobody is inside, and keeps all others out until open is called.
func (g gate) shut(ctx context.Context) (open func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lastTime)
	defer cancel()
	if g.free.Acquire(ctx, wholeGate) != nil {
		return nil, fmt.Errorf("the runtime has not finished starting a command in the container: %w", fault.Unavailable)
	}
	return func() { g.free.Release(wholeGate) }, nil
}
