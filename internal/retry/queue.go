// Package retry repeats unfinished work until it succeeds.
package retry

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/backoff"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
)

// Config configures a Queue.
type Config struct {
	// Width is how many items are attempted at a time. An attempt that takes
	// longer than Slot is probably waiting rather than working, and makes room
	// for another.
	Width int
	Slot  time.Duration
	// First and Max bound the interval between two attempts, which doubles each
	// time.
	First, Max time.Duration
	// Limit bounds an attempt. One that ignores its context continues, but no
	// second attempt of its item begins meanwhile.
	Limit time.Duration
	// Attempt does the work of an item once; Failed is called for attempts by the
	// queue itself that failed.
	Attempt func(ctx context.Context, key string, work Work) error
	Failed  func(key string, err error)
}

// Work is a piece of work to retry. It must be idempotent.
type Work func(context.Context) error

// Queue holds unfinished work, one item for each key. Each item is retried on
// its own goroutine, so that one that hangs does not delay another. The end of
// New's context ends the attempts; the items are lost with the process, and
// their creators must know how to find them again.
type Queue struct {
	cfg     Config
	ctx     context.Context
	slots   chan struct{}
	running sync.WaitGroup

	mu    sync.Mutex
	items map[string]*item
}

// item is the work for one key. Later work for the key replaces it, even during
// an attempt.
type item struct {
	key        string
	work       Work
	attempting chan struct{} // full during an attempt
	attempted  chan struct{} // closed after the first attempt, or once the item is over
	added      time.Time
	err        error         // of the last attempt, guarded by the queue's lock
	over       chan struct{} // closed when the work is done or has been replaced
}

// New returns an empty queue, which runs until ctx ends.
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
	i := &item{key: key, work: work, attempting: make(chan struct{}, 1), attempted: make(chan struct{}), over: make(chan struct{}), added: time.Now()}
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

// Keys returns the keys that have work, in order.
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

// Pending is an item of a queue.
type Pending struct {
	Key   string
	Since time.Time
	Err   error // of the last attempt; nil: there was none yet
}

// Pending returns the items, in the order of their keys.
func (q *Queue) Pending() []Pending {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := make([]Pending, 0, len(q.items))
	for key, i := range q.items {
		list = append(list, Pending{key, i.added, i.err})
	}
	slices.SortFunc(list, func(a, b Pending) int { return cmp.Compare(a.Key, b.Key) })
	return list
}

// Len is the number of items.
func (q *Queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items)
}

// Has reports whether a key has work.
func (q *Queue) Has(key string) bool { return q.find(key) != nil }

func (q *Queue) find(key string) *item {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.items[key]
}

// Try attempts the work for a key now, or waits for the attempt under way. It
// returns nil if there is no work.
func (q *Queue) Try(ctx context.Context, key string) error {
	i := q.find(key)
	if i == nil {
		return nil
	}
	return q.attempt(ctx, i)
}

// Wait returns when no attempt is running any more, after the end of New's
// context.
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

// takeSlot waits for a slot; ok is false if the item is over or the queue has
// ended.
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

// attempt does the work of an item, unless the item is over. It returns soon
// after Config.Limit, or the end of the queue, even if the work does not; the
// end of ctx does not interrupt it.
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
	case <-i.over: // done by the attempt for which this one has waited
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
		q.failed(i, err)
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

func (q *Queue) failed(i *item, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i.err = err
}

// finish removes an item, but not another one that has replaced it.
func (q *Queue) finish(i *item) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.items[i.key] == i {
		delete(q.items, i.key)
		close(i.over)
	}
}
