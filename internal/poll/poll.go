// Package poll waits for conditions that neither the kernel nor another process
// announces.
package poll

import (
	"context"
	"time"
)

// Until calls done at once and then once per period, until it returns true or
// ctx ends, and reports whether it returned true. The last call comes after the
// end of ctx, in case the machine stood still.
func Until(ctx context.Context, period time.Duration, done func() bool) bool {
	for {
		over := ctx.Err() != nil
		if done() {
			return true
		}
		if over {
			return false
		}
		Pause(ctx, period)
	}
}

// Pause waits for d, and reports false if ctx ended earlier.
func Pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
