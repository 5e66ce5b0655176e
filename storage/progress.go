package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
)

var (
	errStalled = errors.New("no data received from the registry for image.progress_timeout")
	errTooSlow = errors.New("the registry sent fewer bytes per second than image.min_pull_rate, over image.progress_timeout")
	errTooLong = errors.New("the pull took longer than image.pull_timeout")
)

// causeOf replaces an error by the reason for which ctx ended, if it did.
func causeOf(ctx context.Context, err error) error {
	switch cause := context.Cause(ctx); {
	case cause == nil || err == nil:
		return err
	case errors.Is(cause, errStalled), errors.Is(cause, errTooSlow), errors.Is(cause, errTooLong):
		return fmt.Errorf("%w: %w", cause, fault.Timeout)
	case errors.Is(cause, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", cause, fault.Timeout)
	default:
		return cause
	}
}

// watchdog ends a pull that waits for bytes which do not come, or come too slowly.
// It counts only while bytes are due or an answer of the registry is under way,
// whatever sizes the manifest names: unpacking may take as long as it needs.
type watchdog struct {
	counts *PullCounts
	pull   *PullProgress
	limit  time.Duration // 0: none
	least  int64         // bytes that are due in limit; 0: any
	asked  func() bool   // an answer is under way
	cancel context.CancelCauseFunc
	events chan types.ProgressProperties // as the library reports
	end    chan struct{}
	done   sync.WaitGroup
}

// newWatchdog watches a pull of an image: rate is in bytes per second, and asked
// tells whether an answer of the registry is under way.
func newWatchdog(counts *PullCounts, image string, limit time.Duration, rate int64, asked func() bool, cancel context.CancelCauseFunc) *watchdog {
	return &watchdog{
		counts: counts,
		pull:   counts.begin(image),
		limit:  limit,
		least:  int64(limit.Seconds() * float64(rate)),
		asked:  asked,
		cancel: cancel,
		events: make(chan types.ProgressProperties, 64),
		end:    make(chan struct{}),
	}
}

// start watches until stop.
func (w *watchdog) start(ctx context.Context) *watchdog {
	w.done.Go(func() {
		if panics.Do(ctx, "watch pull", func() error { w.run(); return nil }) != nil {
			w.discard()
		}
	})
	return w
}

// PullCounts is what pulls have done since the store was opened, and what they
// are doing.
type PullCounts struct {
	Bytes   atomic.Int64 // that came from registries, as they are compressed there
	Fetched atomic.Int64 // blobs
	Present atomic.Int64 // blobs that were there already

	mu     sync.Mutex
	active map[*PullProgress]bool
}

// PullProgress is a pull under way. Layers count from when it is their turn, a
// few at a time, so that the totals grow.
type PullProgress struct {
	Image string    `json:"image"`
	Since time.Time `json:"since"`
	Bytes int64     `json:"bytes"` // that have come
	Total int64     `json:"total"` // of the blobs so far
	Blobs int       `json:"blobs"`
	Done  int       `json:"done"` // of them
}

// Pulls are the store's own.
func (s *Store) Pulls() *PullCounts { return &s.pulls }

// Active are the pulls under way, the first one first.
func (c *PullCounts) Active() []PullProgress {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]PullProgress, 0, len(c.active))
	for p := range c.active {
		list = append(list, *p)
	}
	slices.SortFunc(list, func(a, b PullProgress) int { return a.Since.Compare(b.Since) })
	return list
}

func (c *PullCounts) begin(image string) *PullProgress {
	p := &PullProgress{Image: image, Since: time.Now()}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.active == nil {
		c.active = map[*PullProgress]bool{}
	}
	c.active[p] = true
	return p
}

func (c *PullCounts) end(p *PullProgress) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.active, p)
}

// note counts an event of the pull p.
func (c *PullCounts) note(p *PullProgress, event types.ProgressProperties) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Bytes.Add(int64(event.OffsetUpdate))
	p.Bytes += int64(event.OffsetUpdate)
	switch event.Event {
	case types.ProgressEventNewArtifact:
		p.Blobs++
		p.Total += max(event.Artifact.Size, 0)
	case types.ProgressEventDone:
		c.Fetched.Add(1)
		p.Done++
	case types.ProgressEventSkipped:
		c.Present.Add(1)
	}
}

// stop must be called when the library sends no more.
func (w *watchdog) stop() {
	close(w.end)
	w.done.Wait()
	w.counts.end(w.pull)
}

func (w *watchdog) run() {
	idle, window := time.NewTimer(w.limit), time.NewTimer(w.limit)
	defer idle.Stop()
	defer window.Stop()
	if w.limit == 0 { // and they are never set
		idle.Stop()
		window.Stop()
	}
	var layers downloads
	var came int64 // in the window
	for {
		select {
		case <-w.end:
			for len(w.events) > 0 { // nobody sends any more
				w.counts.note(w.pull, <-w.events)
			}
			return
		case event := <-w.events:
			w.counts.note(w.pull, event)
			waited := layers.waiting() || w.asked()
			layers.note(event)
			if w.limit == 0 {
				continue
			}
			idle.Reset(w.limit)
			came += worth(event)
			if !waited { // there was nothing that could have come
				came = worth(event)
				window.Reset(w.limit)
			}
		case <-idle.C:
			if layers.waiting() || w.asked() {
				w.cancel(errStalled)
			}
			idle.Reset(w.limit)
		case <-window.C:
			if (layers.waiting() || w.asked()) && came < w.least {
				w.cancel(errTooSlow)
			}
			came = 0
			window.Reset(w.limit)
		}
	}
}

// discard takes events, which the library waits for.
func (w *watchdog) discard() {
	for {
		select {
		case <-w.events:
		case <-w.end:
			return
		}
	}
}

// worth is the bytes that an event counts for. A blob that is complete counts for
// more than its own: an image of many small ones waits for answers, not for bytes.
func worth(event types.ProgressProperties) int64 {
	const perBlob = 64 << 10
	if event.Event == types.ProgressEventDone || event.Event == types.ProgressEventSkipped {
		return perBlob
	}
	return int64(event.OffsetUpdate)
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
