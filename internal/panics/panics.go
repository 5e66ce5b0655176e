// Package panics keeps a bug in one piece of work from ending the server: a
// panic becomes that work's error, and its stack trace goes to the log.
//
// It is for work whose owner can continue without it: a request, an operation
// on one pod, one session. A mutex that is unlocked without defer stays locked.
package panics

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/crius-run/crius/internal/fault"
)

var recovered atomic.Uint64

var watchers struct {
	sync.Mutex
	all map[*func(cause any)]bool
}

// Watch has f called with the value of every recovered panic until stop is
// called.
func Watch(f func(cause any)) (stop func()) {
	watchers.Lock()
	defer watchers.Unlock()
	if watchers.all == nil {
		watchers.all = map[*func(any)]bool{}
	}
	key := &f
	watchers.all[key] = true
	return func() {
		watchers.Lock()
		defer watchers.Unlock()
		delete(watchers.all, key)
	}
}

func notifyWatchers(cause any) {
	watchers.Lock()
	defer watchers.Unlock()
	for f := range watchers.all {
		(*f)(cause)
	}
}

// Count returns how many panics have been recovered since the program started.
func Count() uint64 { return recovered.Load() }

// Recover must be deferred. It turns a panic into *err, which is fault.Internal
// and has no details, and logs it with its stack trace.
func Recover(ctx context.Context, work string, err *error) {
	cause := recover()
	if cause == nil {
		return
	}
	stack := debug.Stack()
	if m, ok := cause.(*memberPanic); ok {
		cause, stack = m.cause, m.stack
	}
	recovered.Add(1)
	notifyWatchers(cause)
	slog.ErrorContext(ctx, "internal error (panic)", "work", work, "cause", cause, "stack", string(stack))
	*err = fmt.Errorf("%s: %w", work, fault.Internal)
}

// Do runs f and returns its error, or fault.Internal after a panic.
func Do(ctx context.Context, work string, f func() error) (err error) {
	defer Recover(ctx, work, &err)
	return f()
}

// Run is Do for work without a result: a panic is only logged.
func Run(ctx context.Context, work string, f func()) {
	_ = Do(ctx, work, func() error { f(); return nil })
}

// Group is a sync.WaitGroup whose Wait repeats the first panic of its
// goroutines: for work that its owner does concurrently.
type Group struct {
	group  sync.WaitGroup
	failed atomic.Pointer[memberPanic]
}

type memberPanic struct {
	cause any
	stack []byte
}

// Go runs f in a goroutine.
func (g *Group) Go(f func()) {
	g.group.Go(func() {
		defer func() {
			if cause := recover(); cause != nil {
				g.failed.CompareAndSwap(nil, &memberPanic{cause, debug.Stack()})
			}
		}()
		f()
	})
}

// Wait returns when all goroutines have ended.
func (g *Group) Wait() {
	g.group.Wait()
	if failed := g.failed.Load(); failed != nil {
		panic(failed)
	}
}
