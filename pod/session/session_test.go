package session

import (
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A client that reads slowly keeps the last output of a container that has
// ended until it has had all of it; one that has stopped reading does not.
func TestDrainWaitsForReaders(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		exited := make(chan struct{})
		v := &session{exited: exited}
		over, unread := make(chan struct{}), make(chan struct{})
		go v.awaitDrain(over, nil, unread)
		given := func() bool {
			synctest.Wait()
			select {
			case <-unread:
				return true
			default:
				return false
			}
		}
		out := v.count(io.Discard)
		close(exited)
		for i := range 10 {
			time.Sleep(drainTime * 9 / 10)
			if given() {
				t.Fatalf("given up after %d pieces of output that the client took", i)
			}
			if _, err := out.Write([]byte("last words")); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * drainTime)
		if !given() {
			t.Error("a client that has stopped reading is waited for")
		}
	})
}

// A client whose input has ended leaves once the container has answered it: a reply
// that takes its time is waited for, and neither a container that does not read nor
// one that writes for ever keeps the client.
func TestClientLeavesOnceAnswered(t *testing.T) {
	t.Parallel()
	const pause = quietTime / 2
	for name, test := range map[string]struct {
		does        func(pauses int) (unread int, writes bool) // the container
		after, upTo int                                        // so many pauses the client leaves
	}{
		"nothing to say":       {func(int) (int, bool) { return 0, false }, 2, 3},
		"replies":              {func(n int) (int, bool) { return 0, n < 3 }, 4, 5},
		"reads slowly":         {func(n int) (int, bool) { return max(0, 20-n), n == 20 }, 22, 23},
		"reads in long pauses": {func(n int) (int, bool) { return max(0, 20-n/3*3), false }, 23, 24},
		"does not read":        {func(int) (int, bool) { return 10, false }, 4, 5},
		"writes for ever":      {func(int) (int, bool) { return 0, true }, 4, 5},
		"never reads, writes":  {func(int) (int, bool) { return 10, true }, 4, 5},
		"others send more":     {func(n int) (int, bool) { return 10 + n%2, false }, 4, 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				v := &session{}
				out := v.count(io.Discard)
				over, answered := make(chan struct{}), make(chan struct{})
				defer close(over)
				var unread atomic.Int64
				does := func(pauses int) {
					n, writes := test.does(pauses)
					if unread.Store(int64(n)); writes {
						_, _ = out.Write([]byte("a reply"))
					}
				}
				does(0)
				go v.awaitAnswer(func() int { return int(unread.Load()) }, over, answered)
				for n := 1; n <= test.upTo; n++ {
					time.Sleep(pause)
					synctest.Wait()
					select {
					case <-answered:
						if n < test.after {
							t.Errorf("the client leaves after %d pauses, too early", n)
						}
						return
					default:
					}
					does(n)
				}
				t.Error("the client does not leave")
			})
		})
	}
}
