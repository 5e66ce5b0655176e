package retry

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

const width = 4

var (
	errOnce    = errors.New("not yet")
	errClosing = errors.New("closing")
)

// queue runs a test with a fake clock and a queue, which ends with the test.
func queue(t *testing.T, test func(t *testing.T, q *Queue, end func())) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		end := func() { cancel(errClosing) }
		q := New(ctx, Config{
			Width: width, Slot: 5 * time.Second, First: time.Second, Max: time.Minute, Limit: 2 * time.Minute,
			Attempt: func(ctx context.Context, _ string, work Work) error { return work(ctx) },
			Failed:  func(key string, err error) { t.Logf("%s: %v", key, err) },
		})
		test(t, q, end)
		end()
		q.Wait()
	})
}

// drained waits until the queue is empty.
func drained(t *testing.T, q *Queue) {
	t.Helper()
	for end := time.Now().Add(24 * time.Hour); q.Len() > 0; time.Sleep(time.Second) {
		if time.Now().After(end) {
			t.Fatalf("work for %q is never done", q.Keys())
		}
	}
}

func TestWorkIsRepeatedUntilItSucceeds(t *testing.T) {
	queue(t, func(t *testing.T, q *Queue, _ func()) {
		start := time.Now()
		var at []time.Duration
		q.Add("a", func(context.Context) error {
			at = append(at, time.Since(start))
			if len(at) == 2 {
				panic("a defect of the work")
			}
			if len(at) < 10 {
				return errOnce
			}
			return nil
		})
		if !q.Has("a") || q.Has("b") || q.Len() != 1 {
			t.Errorf("keys: %q", q.Keys())
		}
		drained(t, q)
		want := []time.Duration{1, 3, 7, 15, 31, 63, 123, 183, 243, 303}
		for i := range want {
			want[i] *= time.Second
		}
		if fmt.Sprint(at) != fmt.Sprint(want) {
			t.Errorf("attempts at %v, want %v", at, want)
		}
		if err := q.Try(t.Context(), "a"); err != nil {
			t.Errorf("try what is done: %v", err)
		}
	})
}

func TestFirstAttemptAtOnce(t *testing.T) {
	queue(t, func(t *testing.T, q *Queue, _ func()) {
		start := time.Now()
		var attempts atomic.Int32
		<-q.AddNow("a", func(context.Context) error {
			if attempts.Add(1) == 1 {
				return errOnce
			}
			return nil
		})
		if attempts.Load() != 1 || time.Since(start) != 0 || q.Len() != 1 {
			t.Errorf("%d attempts after %v, %d items", attempts.Load(), time.Since(start), q.Len())
		}
		drained(t, q)
	})
}

// Work that cannot be done now does not delay other work, and work that
// replaces another during an attempt is not removed with it.
func TestWorkIsReplacedDuringAnAttempt(t *testing.T) {
	queue(t, func(t *testing.T, q *Queue, _ func()) {
		attempting, replaced, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
		q.Add("a", func(context.Context) error {
			close(attempting)
			<-replaced
			return nil
		})
		q.Add("b", func(context.Context) error {
			<-attempting // for ever, if the other one has to end first
			q.Add("a", func(context.Context) error { close(done); return nil })
			close(replaced)
			return nil
		})
		<-done
		drained(t, q)
	})
}

// Hanging work, even if it ignores its context, does not delay other work,
// however much of it there is, and is never done twice at a time.
func TestWorkThatHangs(t *testing.T) {
	queue(t, func(t *testing.T, q *Queue, _ func()) {
		release := make(chan struct{})
		var hanging atomic.Int32
		for i := range 2 * width {
			q.Add(fmt.Sprint("hangs", i), func(context.Context) error { hanging.Add(1); <-release; return nil })
		}
		done := make(chan struct{})
		q.Add("other", func(context.Context) error { close(done); return nil })
		<-done // never, if it waits for the hanging ones
		if err := q.Try(t.Context(), "hangs0"); !errors.Is(err, fault.Timeout) {
			t.Errorf("try what hangs: %v", err)
		}
		again := make(chan error, 1)
		go func() { again <- q.Try(t.Context(), "hangs0") }()
		close(release)
		if err := <-again; err != nil {
			t.Errorf("wait for the attempt under way: %v", err)
		}
		drained(t, q)
		if n := hanging.Load(); n != 2*width {
			t.Errorf("%d attempts of %d items", n, 2*width)
		}
	})
}

// The end of the queue interrupts attempts; unfinished work stays in it.
func TestEndInterruptsAttempts(t *testing.T) {
	queue(t, func(t *testing.T, q *Queue, end func()) {
		cause := make(chan error, 1)
		attempting := make(chan struct{})
		q.Add("a", func(ctx context.Context) error {
			close(attempting)
			<-ctx.Done()
			cause <- context.Cause(ctx)
			return ctx.Err()
		})
		<-attempting
		end()
		q.Wait()
		if err := <-cause; !errors.Is(err, errClosing) {
			t.Errorf("the attempt ended because of %v", err)
		}
		if !q.Has("a") {
			t.Error("the work is forgotten")
		}
	})
}
