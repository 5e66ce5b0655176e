package flight

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// TestJoin: any number of callers of one key share one run and its result.
func TestJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group[string, int]
		var runs atomic.Int32
		release := make(chan struct{})
		for range 10 {
			go func() {
				v, err := g.Do(t.Context(), "k", func(context.Context) (int, error) {
					runs.Add(1)
					<-release
					return 42, nil
				})
				if v != 42 || err != nil {
					t.Errorf("got %d, %v", v, err)
				}
			}()
		}
		synctest.Wait() // all ten wait in Do
		close(release)
		synctest.Wait()
		if n := runs.Load(); n != 1 {
			t.Errorf("work ran %d times", n)
		}
	})
}

// TestCallerGone reproduces cri-o/cri-o#7010: a caller whose time is up leaves,
// the work continues unaffected, and the retry gets its result.
func TestCallerGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group[string, string]
		release := make(chan struct{})
		impatient, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := g.Do(impatient, "pod", func(ctx context.Context) (string, error) {
			<-release
			return "the id", ctx.Err()
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v", err)
		}
		go func() {
			id, err := g.Do(t.Context(), "pod", func(context.Context) (string, error) {
				return "a second run", nil
			})
			if id != "the id" || err != nil {
				t.Errorf("retry got %q, %v", id, err)
			}
		}()
		synctest.Wait()
		close(release)
		synctest.Wait()
	})
}

// TestPanic: a panic is that work's error, and the key is free again.
func TestPanic(t *testing.T) {
	var g Group[int, int]
	_, err := g.Do(context.Background(), 1, func(context.Context) (int, error) { panic("boom") })
	if !errors.Is(err, fault.Internal) || strings.Contains(err.Error(), "boom") || strings.Contains(err.Error(), ".go:") {
		t.Fatalf("got %v", err)
	}
	v, err := g.Do(context.Background(), 1, func(context.Context) (int, error) { return 7, nil })
	if v != 7 || err != nil {
		t.Fatalf("got %d, %v", v, err)
	}
}

// TestWait returns only when the last work has ended, or its own context has.
func TestWait(t *testing.T) {
	var g Group[int, int]
	release := make(chan struct{})
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	_, _ = g.Do(gone, 1, func(context.Context) (int, error) { <-release; return 0, nil })
	if err := g.Wait(gone); !errors.Is(err, context.Canceled) {
		t.Fatalf("Wait with a dead context: %v", err)
	}
	close(release)
	if err := g.Wait(context.Background()); err != nil {
		t.Fatal(err)
	}
	if len(g.running) != 0 {
		t.Errorf("%d works left", len(g.running))
	}
}

// Work without a waiting caller ends after a while, unless a caller asks for it
// again.
func TestAbandonedWorkEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := Group[string, int]{Patience: time.Minute}
		var runs atomic.Int32
		work := func(ctx context.Context) (int, error) {
			n := int(runs.Add(1))
			select {
			case <-ctx.Done():
				time.Sleep(time.Second) // to clean up
				return n, context.Cause(ctx)
			case <-time.After(time.Hour):
				return n, nil
			}
		}
		ask := func(patience time.Duration) (int, error) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			return g.Do(ctx, "k", work)
		}
		for range 5 {
			if _, err := ask(time.Second); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			time.Sleep(50 * time.Second)
		}
		if n := runs.Load(); n != 1 {
			t.Errorf("%d runs, although somebody asked every minute", n)
		}
		time.Sleep(10*time.Second + time.Millisecond)
		// It is cleaning up: a new caller gets another run, to its end.
		if n, err := ask(2 * time.Hour); n != 2 || err != nil {
			t.Errorf("got %d, %v", n, err)
		}
		if len(g.abandoned) != 0 || len(g.running) != 0 {
			t.Errorf("left: %v, %v", g.abandoned, g.running)
		}
	})
}

func TestAbandonedWorkIsBoundedInSum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := Group[int, int]{Patience: time.Hour, MostAbandoned: 3}
		ends := make(chan int, 6)
		for key := range 6 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, _ = g.Do(ctx, key, func(ctx context.Context) (int, error) {
				<-ctx.Done()
				ends <- key
				return 0, context.Cause(ctx)
			})
			cancel()
		}
		synctest.Wait()
		var ended []int
		for range len(ends) {
			ended = append(ended, <-ends)
		}
		if slices.Sort(ended); !slices.Equal(ended, []int{0, 1, 2}) {
			t.Errorf("ended: %v, want the oldest", ended)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(ends) != 3 {
			t.Errorf("%d of the others have ended", len(ends))
		}
	})
}

// TestAwait: work that waits for a caller ends when one joins, when its time is up, and when none can come any more.
func TestAwait(t *testing.T) {
	const patience = time.Hour
	for want, come := range map[time.Duration]func(g *Group[string, int]){
		time.Minute:     func(g *Group[string, int]) { _, _ = g.Do(context.Background(), "k", nil) },
		2 * time.Minute: func(g *Group[string, int]) { time.Sleep(time.Minute); _ = g.Wait(context.Background()) },
		patience:        func(g *Group[string, int]) { time.Sleep(patience) },
	} {
		synctest.Test(t, func(t *testing.T) {
			var g Group[string, int]
			start := time.Now()
			var took time.Duration
			hasty, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, _ = g.Do(hasty, "k", func(ctx context.Context) (int, error) {
				Await(ctx) // its first caller is there
				if !time.Now().Equal(start) {
					t.Error("waited for a caller who was there")
				}
				time.Sleep(30 * time.Second)
				<-hasty.Done()
				synctest.Wait()
				ctx, cancel := context.WithDeadline(ctx, start.Add(patience))
				defer cancel()
				Await(ctx)
				took = time.Since(start)
				return 0, nil
			})
			come(&g)
			synctest.Wait()
			if took != want {
				t.Errorf("waited %s, want %s", took, want)
			}
		})
	}
	Await(t.Context()) // of no work
}

// Whoever waits for running work learns when it has ended, without joining it.
func TestRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Group[string, int]
		if g.Running("k") != nil {
			t.Error("work runs that was never begun")
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		release := make(chan struct{})
		_, _ = g.Do(gone, "k", func(context.Context) (int, error) { <-release; return 0, nil })
		ended := g.Running("k")
		if ended == nil || g.Running("other") != nil {
			t.Fatal("work runs whose caller has left, and no other")
		}
		select {
		case <-ended:
			t.Error("it has ended")
		default:
		}
		close(release)
		<-ended
		if g.Running("k") != nil {
			t.Error("it runs on")
		}
	})
}
