// Package poll waits for what neither the kernel nor another process announces.
package poll

import (
	"context"
	"time"
)

// Until calls done at once and then once per period, until it is true or ctx is
// over, and reports whether it was true. The last call is after the end of ctx: a machine
// that has stood still is no reason to give up.
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

// Pause waits for d, and reports whether ctx has lasted as long.
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
