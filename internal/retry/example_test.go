package retry_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/crius-run/crius/internal/retry"
)

// Work that fails is attempted again until it succeeds, with growing pauses.
func ExampleQueue() {
	ctx, end := context.WithCancel(context.Background())
	cleanups := retry.New(ctx, retry.Config{
		Width: 4, Slot: time.Second, First: time.Millisecond, Max: time.Minute, Limit: time.Minute,
		Attempt: func(ctx context.Context, _ string, work retry.Work) error { return work(ctx) },
		Failed:  func(key string, err error) { fmt.Printf("%s: %v, retrying\n", key, err) },
	})
	busy, done := true, make(chan struct{})
	cleanups.AddNow("web", func(context.Context) error {
		if busy {
			busy = false
			return errors.New("device busy")
		}
		fmt.Println("unmounted")
		close(done)
		return nil
	})
	<-done
	end()
	cleanups.Wait()
	// Output:
	// web: device busy, retrying
	// unmounted
}
