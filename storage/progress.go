package storage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

var (
	errStalled = errors.New("no byte came from the registry for storage.progress_timeout")
	errTooLong = errors.New("the pull took longer than storage.pull_timeout")
)

// causeOf replaces an error by the reason for which ctx ended, if it did.
func causeOf(ctx context.Context, err error) error {
	switch cause := context.Cause(ctx); {
	case cause == nil || err == nil:
		return err
	case errors.Is(cause, errStalled), errors.Is(cause, errTooLong):
		return fmt.Errorf("%w: %w", fault.Timeout, cause)
	case errors.Is(cause, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", fault.Timeout, cause)
	default:
		return cause
	}
}

// watchdog ends a pull that waits for bytes which do not come. It counts bytes
// only while a layer is under way: unpacking may take as long as it needs.
type watchdog struct {
	counts *PullCounts
	limit  time.Duration // 0: none
	cancel context.CancelCauseFunc
	events chan types.ProgressProperties // as the library reports
	end    chan struct{}
	done   sync.WaitGroup
}

func newWatchdog(counts *PullCounts, limit time.Duration, cancel context.CancelCauseFunc) *watchdog {
	w := &watchdog{
		counts: counts,
		limit:  limit,
		cancel: cancel,
		events: make(chan types.ProgressProperties, 64),
		end:    make(chan struct{}),
	}
	w.done.Go(w.run)
	return w
}

// PullCounts is what pulls have done since the store was opened.
type PullCounts struct {
	Bytes   atomic.Int64 // that came from registries, as they are compressed there
	Fetched atomic.Int64 // blobs
	Present atomic.Int64 // blobs that were there already
}

// Pulls are the store's own.
func (s *Store) Pulls() *PullCounts { return &s.pulls }

func (c *PullCounts) note(event types.ProgressProperties) {
	c.Bytes.Add(int64(event.OffsetUpdate))
	switch event.Event {
	case types.ProgressEventDone:
		c.Fetched.Add(1)
	case types.ProgressEventSkipped:
		c.Present.Add(1)
	}
}

// stop must be called when the library sends no more.
func (w *watchdog) stop() {
	close(w.end)
	w.done.Wait()
}

func (w *watchdog) run() {
	timer := time.NewTimer(w.limit)
	defer timer.Stop()
	if w.limit == 0 {
		timer.Stop() // and it is never set
	}
	var layers downloads
	for {
		select {
		case <-w.end:
			for len(w.events) > 0 { // nobody sends any more
				w.counts.note(<-w.events)
			}
			return
		case event := <-w.events:
			w.counts.note(event)
			layers.note(event)
			if w.limit > 0 {
				timer.Reset(w.limit)
			}
		case <-timer.C:
			if layers.waiting() {
				w.cancel(errStalled)
			}
			timer.Reset(w.limit)
		}
	}
}

// downloads keeps how many bytes of each blob are still to come.
type downloads struct {
	missing map[digest.Digest]int64 // nil until the first blob
}

func (d *downloads) note(event types.ProgressProperties) {
	if d.missing == nil {
		d.missing = map[digest.Digest]int64{}
	}
	blob := event.Artifact.Digest
	switch event.Event {
	case types.ProgressEventNewArtifact:
		if event.Artifact.Size > 0 {
			d.missing[blob] = event.Artifact.Size
		}
	case types.ProgressEventRead:
		if left := d.missing[blob] - int64(event.OffsetUpdate); left > 0 {
			d.missing[blob] = left
			return
		}
		delete(d.missing, blob)
	default: // done or skipped
		delete(d.missing, blob)
	}
}

// waiting: the registry owes bytes, of a blob or, before the first one, of the
// documents that name them.
func (d *downloads) waiting() bool { return d.missing == nil || len(d.missing) > 0 }
