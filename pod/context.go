package pod

import (
	"context"
	"fmt"
)

// until is ctx until another context ends, with the cause of that.
func until(ctx, end context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(end, func() { cancel(context.Cause(end)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// causedBy puts the reason for which ctx has ended before an error of work that ended
// with it: libraries report no more than that it was cancelled. That error is for people
// alone: callers would take it for a failure of the step that met the end.
func causedBy(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w (%s)", cause, err.Error())
	}
	return err
}
