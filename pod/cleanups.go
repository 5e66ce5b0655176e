package pod

import (
	"context"
	"log/slog"
	"time"

	"github.com/crius-run/crius/internal/retry"
)

const (
	retryMin = time.Second
	retryMax = time.Minute
)

// newCleanups returns the queue of cleanups that could not be finished: usually the teardown of
// an object, or the record of a start. The end of the engine interrupts it; the next engine
// finds the work by the records.
func (e *Engine) newCleanups() *retry.Queue {
	return retry.New(e.background.Closing(), retry.Config{
		Width: recoverWidth, Slot: 5 * time.Second, First: retryMin, Max: retryMax, Limit: undoTime,
		Attempt: func(ctx context.Context, id string, work retry.Work) error {
			err := e.deps.Trace.Do(ctx, "clean up", id, work)
			if err == nil {
				slog.InfoContext(ctx, "cleanup finished", "id", id)
			}
			return err
		},
		Failed: func(id string, err error) { slog.Warn("cleanup incomplete, retrying", "id", id, "err", err) },
	})
}
