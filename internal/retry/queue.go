// Package retry repeats work that could not be finished until it succeeds.
package retry

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
)

// Config is how a Queue works.
type Config struct {
	// Width is how many items are attempted at a time. An attempt that takes longer
	// than Slot waits for something rather than works, and makes room for another.
	Width int
	Slot  time.Duration
	// First and Max bound the time between two attempts, which doubles.
	First, Max time.Duration
	// Limit bounds an attempt. One that ignores its context goes on, but no second
	// attempt of its item begins beside it.
	Limit time.Duration
	// Attempt does the work of an item once; Failed hears of the attempts that the
	// queue itself has made and that have not succeeded.
	Attempt func(ctx context.Context, key string, work Work) error
	Failed  func(key string, err error)
}

// Work is what is to be done. It must be idempotent.
type Work func(context.Context) error

// Queue holds the work that is left, one item for each key. Each item is retried
// on a goroutine of its own, so that one that hangs does not delay another. The end
// of the context that New was given ends the attempts; the items are lost with the
// process, and whoever made them must know how to find them again.
type Queue struct {
	cfg     Config
	ctx     context.Context
	slots   chan struct{}
	running sync.WaitGroup

	mu    sync.Mutex
	items map[string]*item
}

// item is the work for one key. A later one takes its place, also during an
// attempt.
type item struct {
	key        string
	work       Work
	attempting chan struct{} // full during an attempt
	attempted  chan struct{} // closed after the first attempt, or when it is over
	over       chan struct{} // closed when the work is done, or has been replaced
}

// New makes an empty queue, which works until ctx ends.
func New(ctx context.Context, cfg Config) *Queue {
	return &Queue{cfg: cfg, ctx: ctx, slots: make(chan struct{}, cfg.Width), items: map[string]*item{}}
}

// Add takes on work for a key, in place of what it has, and attempts it for the
// first time after Config.First.
func (q *Queue) Add(key string, work Work) { q.add(key, work, false) }

// AddNow is Add with the first attempt at once. The channel is closed after that.
func (q *Queue) AddNow(key string, work Work) (attempted <-chan struct{}) {
	return q.add(key, work, true)
}

func (q *Queue) add(key string, work Work, now bool) <-chan struct{} {
	i := &item{key: key, work: work, attempting: make(chan struct{}, 1), attempted: make(chan struct{}), over: make(chan struct{})}
	q.mu.Lock()
	before := q.items[key]
	q.items[key] = i
	q.mu.Unlock()
	if before != nil {
		close(before.over)
	}
	q.running.Go(func() { q.keepTrying(i, now) })
	return i.attempted
}

// Keys are those for which there is work, in order.
func (q *Queue) Keys() []string {
	q.mu.Lock()
	defer q.mu.Unlock()
	keys := make([]string, 0, len(q.items))
	for key := range q.items {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// Len is the number of items.
func (q *Queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items)
}

// Has says whether there is work for a key.
func (q *Queue) Has(key string) bool { return q.find(key) != nil }

func (q *Queue) find(key string) *item {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.items[key]
}

// Try attempts the work for a key now, or waits for the attempt under way. It is
// nil if there is none any more.
func (q *Queue) Try(ctx context.Context, key string) error {
	i := q.find(key)
	if i == nil {
		return nil
	}
	return q.attempt(ctx, i)
}

// Wait returns when no attempt runs any more, after the end of New's context.
func (q *Queue) Wait() { q.running.Wait() }

// keepTrying attempts an item until it is over or the queue ends.
func (q *Queue) keepTrying(i *item, now bool) {
	pauses, wait := backoff.New(q.cfg.First, q.cfg.Max), time.Duration(0)
	if !now {
		wait = pauses.Next()
	}
	attempted := sync.OnceFunc(func() { close(i.attempted) })
	defer attempted()
	for {
		next := time.NewTimer(wait)
		select {
		case <-q.ctx.Done():
		case <-i.over:
		case <-next.C:
		}
		next.Stop()
		release, ok := q.takeSlot(i)
		if !ok {
			return
		}
		slot := time.AfterFunc(q.cfg.Slot, release)
		if err := q.attempt(q.ctx, i); err != nil {
			q.cfg.Failed(i.key, err)
		}
		slot.Stop()
		release()
		attempted()
		wait = pauses.Next()
	}
}

// takeSlot waits for room, and is false where nothing is to be done any more.
func (q *Queue) takeSlot(i *item) (release func(), ok bool) {
	select {
	case <-q.ctx.Done():
		return nil, false
	case <-i.over:
		return nil, false
	default:
	}
	select {
	case <-q.ctx.Done():
		return nil, false
	case <-i.over:
		return nil, false
	case q.slots <- struct{}{}:
		return sync.OnceFunc(func() { <-q.slots }), true
	}
}

// attempt does the work of an item, unless that is over. It returns soon after
// Config.Limit, or the end of the queue, even where the work does not; that ctx
// ends does not interrupt it.
func (q *Queue) attempt(ctx context.Context, i *item) error {
	ctx, cancelLimit := context.WithTimeoutCause(context.WithoutCancel(ctx), q.cfg.Limit,
		fmt.Errorf("not finished within %s: %w", q.cfg.Limit, fault.Timeout))
	defer cancelLimit()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(q.ctx, func() { cancel(context.Cause(q.ctx)) })()
	select {
	case i.attempting <- struct{}{}:
	case <-i.over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the previous attempt is still running: %w", context.Cause(ctx))
	}
	select {
	case <-i.over: // by the attempt that this one has waited for
		<-i.attempting
		return nil
	default:
	}
	result := make(chan error, 1)
	q.running.Go(func() {
		defer func() { <-i.attempting }()
		err := panics.Do(ctx, "retry", func() error { return q.cfg.Attempt(ctx, i.key, i.work) })
		if err == nil {
			q.finish(i)
		}
		result <- err
	})
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
	}
	const lastWord = time.Second // for work that heeds its context, and knows best why it failed
	select {
	case err := <-result:
		return err
	case <-time.After(lastWord):
		return fmt.Errorf("the attempt is still running: %w", context.Cause(ctx))
	}
}

// finish removes an item, and not another that has taken its place.
func (q *Queue) finish(i *item) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items[i.key] == i {
		delete(q.items, i.key)
		close(i.over)
	}
}
