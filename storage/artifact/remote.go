package artifact

import (
	"context"
	"fmt"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
)

// remote bounds how long callers wait for an additional store, and how many reads of one of its
// artifacts may hang at a time.
type remote struct {
	slots    chan struct{}
	patience time.Duration
}

func newRemote(patience time.Duration) *remote {
	return &remote{make(chan struct{}, 4), patience}
}

// read calls of, which reads something of an artifact in dir, in a goroutine that stays behind if
// it hangs. A nil remote is for artifacts on this node: of is just called.
func read[T any](ctx context.Context, r *remote, dir string, of func() (T, error)) (T, error) {
	if r == nil {
		return of()
	}
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	limit := time.NewTimer(r.patience)
	defer limit.Stop()
	slots := r.slots
	for {
		select {
		case slots <- struct{}{}:
			slots = nil
			go func() {
				defer func() { <-r.slots }()
				var got result
				got.err = panics.Do(ctx, "read additional artifact store", func() (err error) {
					got.value, err = of()
					return err
				})
				done <- got
			}()
		case got := <-done:
			return got.value, got.err
		case <-ctx.Done():
			var none T
			return none, context.Cause(ctx)
		case <-limit.C:
			var none T
			return none, fmt.Errorf("%s, in an additional artifact store, does not answer: check that disk: %w", dir, fault.Unavailable)
		}
	}
}
