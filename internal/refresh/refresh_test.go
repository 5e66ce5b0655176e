package refresh

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Looks are made at once, periodically, and on request; a reader of the last
// answer waits for none of them.
func TestValueIsKeptUpToDate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		found := 0
		v := New(func(context.Context) int { found++; return found })
		if last := v.Last(); last != nil {
			t.Errorf("before Run: %d", *last)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go v.Run(ctx, time.Minute)
		want := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			if last := v.Last(); last == nil || *last != want {
				t.Errorf("%s: %v, want %d", when, last, want)
			}
		}
		want("at once", 1)
		same := v.Last()
		time.Sleep(59 * time.Second)
		if v.Last() != same {
			t.Error("looked before the period has ended")
		}
		time.Sleep(2 * time.Second)
		want("after a period", 2)
		if got := v.Fresh(ctx); *got != 3 {
			t.Errorf("asked for a look: %d", *got)
		}
		time.Sleep(59 * time.Second)
		want("the period counts from the last look", 3)
		cancel()
		time.Sleep(time.Hour)
		want("after the end", 3)
	})
}

// A look that was under way at the time of a request may have missed the
// change, so it does not answer the request; and a caller waits no longer than
// its context.
func TestFreshBeginsAfterTheCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		now := "before"
		v := New(func(context.Context) string {
			seen := now
			time.Sleep(time.Minute)
			return seen
		})
		go v.Run(ctx, time.Hour)
		synctest.Wait()
		now = "after"
		if got := v.Fresh(ctx); *got != "after" {
			t.Errorf("a change before the call is not seen: %q", *got)
		}
		now = "later"
		soon, end := context.WithTimeout(ctx, time.Second)
		defer end()
		if got := v.Fresh(soon); *got != "after" {
			t.Errorf("in a second: %q", *got)
		}
		time.Sleep(time.Hour)
		if got := v.Last(); *got != "later" {
			t.Errorf("the look is not made: %q", *got)
		}
	})
}
