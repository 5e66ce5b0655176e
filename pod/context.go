package pod

import (
	"context"
	"fmt"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// until returns ctx, ended also by the end of another context, with its cause.
func until(ctx, end context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(end, func() { cancel(context.Cause(end)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// undoTime bounds an undo. It runs even when the caller is long gone.
const undoTime = 2 * time.Minute

func undoContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.WithoutCancel(ctx), undoTime,
		fmt.Errorf("cleanup did not finish within %s: %w", undoTime, fault.Timeout))
}
