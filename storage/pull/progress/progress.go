// Package progress counts the downloads of pulls, and cancels pulls to which the registry sends
// nothing, or too little.
package progress

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
	"github.com/crius-run/crius/storage/pull/pullerror"
)

// Reasons for which a pull was ended.
var (
	ErrStalled = errors.New("no data received from the registry for image.progress_timeout")
	ErrTooSlow = errors.New("the registry sent fewer bytes per second than image.min_pull_rate, over image.progress_timeout")
	ErrTooLong = errors.New("the pull took longer than image.pull_timeout")
)

// CauseOf replaces an error by the reason for which ctx ended, if it did.
func CauseOf(ctx context.Context, err error) error {
	switch cause := context.Cause(ctx); {
	case cause == nil || err == nil:
		return err
	case errors.Is(cause, ErrStalled), errors.Is(cause, ErrTooSlow), errors.Is(cause, ErrTooLong):
		return fmt.Errorf("%w: %w", cause, fault.Timeout)
	case errors.Is(cause, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", cause, fault.Timeout)
	default:
		return cause
	}
}

// Events beside those of the library.
const (
	Waiting      types.ProgressEvent = 100 + iota // for another pull that fetches the blob: nothing is due
	Resumed                                       // bytes were in the file, from an earlier pull
	Connected                                     // one more connection to the registry brings bytes
	Disconnected                                  // one connection less brings bytes
)

// Watchdog ends a pull that waits for bytes that do not come, or come too slowly. It counts only
// while bytes are due or an answer of the registry is under way, whatever sizes the manifest names:
// unpacking may take as long as it needs.
type Watchdog struct {
	// Events receives what the library reports, until Stop.
	Events chan types.ProgressProperties
	// Waited reports whether the pull waits for another pull, or has waited since the last call:
	// then nothing is due, and what comes afterwards has the whole time. Set it before Start; nil:
	// the pull never waits.
	Waited func() bool

	counts *Counts
	pull   *Pull
	limit  time.Duration // 0: none
	least  int64         // bytes that must come in limit; 0: any
	asked  func() bool   // reports whether an answer is under way
	cancel context.CancelCauseFunc
	end    chan struct{}
	ended  func() // nil: the pull continues without the watchdog
	done   sync.WaitGroup
}

// New returns a watchdog for the pull of an image. rate is in bytes per second; asked reports
// whether an answer of the registry is under way.
func New(counts *Counts, image string, limit time.Duration, rate int64, asked func() bool, cancel context.CancelCauseFunc) *Watchdog {
	return &Watchdog{
		counts: counts,
		pull:   &Pull{Image: image, Since: time.Now()},
		limit:  limit,
		least:  int64(limit.Seconds() * float64(rate)),
		asked:  asked,
		cancel: cancel,
		Events: make(chan types.ProgressProperties, 64),
		end:    make(chan struct{}),
	}
}

// Start begins to watch, until Stop. If ctx is that of a pull (Counts.Begin), it counts for it.
func (w *Watchdog) Start(ctx context.Context) *Watchdog {
	if p, ok := ctx.Value(pullKey{}).(*Pull); ok {
		w.counts.restart(p)
		w.pull = p
	} else {
		_, w.pull, w.ended = w.counts.begin(ctx, w.pull.Image)
	}
	w.done.Go(func() {
		if panics.Do(ctx, "watch pull", func() error { w.run(); return nil }) != nil {
			w.discard()
		}
	})
	return w
}

// Counts counts what pulls have done since the store was opened, and what they are doing.
type Counts struct {
	Bytes   atomic.Int64 // from registries, compressed as there
	Resumed atomic.Int64 // bytes from earlier pulls, or from other pulls at the same time
	Fetched atomic.Int64 // blobs
	Present atomic.Int64 // blobs that did not have to be fetched
	Took    Durations    // of pulls that brought an image
	Warned  atomic.Int64 // warnings of registries

	mu          sync.Mutex
	active      map[*Pull]context.CancelCauseFunc
	interrupted bool
	warnings    []Warning // the latest ones, the oldest first
}

// Pull is a pull under way. Its layers count when it is their turn, a few at a time, so the totals
// grow.
type Pull struct {
	Image string    `json:"image"`
	Since time.Time `json:"since"`
	Bytes int64     `json:"bytes"` // that have come
	Total int64     `json:"total"` // of the blobs that count so far
	Blobs int       `json:"blobs"`
	Done  int       `json:"done"` // of them

	Unpacking int   `json:"unpacking"` // blobs that have come but are not done
	Resumed   int64 `json:"resumed"`   // of the bytes that have come, those of earlier pulls

	Connections int `json:"connections"` // over which blobs are coming

	// Throttled is the registry that has asked to wait until Until; empty: none has.
	Throttled string    `json:"throttled,omitempty"`
	Until     time.Time `json:"until,omitzero"`

	// Warnings are texts of registries for users, each once, the first ones.
	Warnings []string `json:"warnings,omitempty"`

	warned int // warnings in total
}

// Connections returns the event for a change of 1 or -1 in the number of connections.
func Connections(change int) types.ProgressEvent {
	if change > 0 {
		return Connected
	}
	return Disconnected
}

// Active returns the pulls under way, the oldest first.
func (c *Counts) Active() []Pull {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]Pull, 0, len(c.active))
	for p := range c.active {
		shown := *p
		shown.Warnings = slices.Clone(p.Warnings)
		list = append(list, shown)
	}
	slices.SortFunc(list, func(a, b Pull) int { return a.Since.Compare(b.Since) })
	return list
}

type pullKey struct{}

// Begin lists a pull of an image until end is called, from before its registry has answered.
// Watchdogs that are started with the returned context count for it.
func (c *Counts) Begin(ctx context.Context, image string) (_ context.Context, end func()) {
	ctx, p, end := c.begin(ctx, image)
	return context.WithValue(ctx, pullKey{}, p), end
}

func (c *Counts) begin(ctx context.Context, image string) (context.Context, *Pull, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	p := &Pull{Image: image, Since: time.Now()}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.active == nil {
		c.active = map[*Pull]context.CancelCauseFunc{}
	}
	c.active[p] = cancel
	return ctx, p, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.active, p)
		cancel(nil)
	}
}

// restart makes a pull one that has fetched nothing yet: it is tried once more, from another
// registry for instance.
func (c *Counts) restart(p *Pull) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*p = Pull{Image: p.Image, Since: p.Since, Warnings: p.Warnings, warned: p.warned}
}

// Throttle shows, until done is called, that the registry at host has asked the pull of ctx to
// wait. If the counts are or become Interrupted meanwhile, the pull ends.
func (c *Counts) Throttle(ctx context.Context, host string, until time.Time) (done func()) {
	p, ok := ctx.Value(pullKey{}).(*Pull)
	if !ok {
		return func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p.Throttled, p.Until = host, until
	if c.interrupted {
		c.interrupt(p)
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if p.Throttled == host && p.Until.Equal(until) {
			p.Throttled, p.Until = "", time.Time{}
		}
	}
}

// CauseOf is the function of this name for the pull of ctx. Of a registry that has asked to wait for longer than
// image.progress_timeout it says so.
func (c *Counts) CauseOf(ctx context.Context, err error) error {
	cause := CauseOf(ctx, err)
	if p, ok := ctx.Value(pullKey{}).(*Pull); ok && errors.Is(cause, ErrStalled) {
		if stalled := c.stalled(p); !errors.Is(stalled, ErrStalled) {
			return stalled
		}
	}
	return cause
}

// stalled returns why nothing has come.
func (c *Counts) stalled(p *Pull) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.Throttled == "" || time.Now().After(p.Until) {
		return ErrStalled
	}
	return fmt.Errorf("registry %s has asked to wait until %s, %w: %w", p.Throttled, p.Until.Format(time.TimeOnly), pullerror.ErrThrottled, fault.Unavailable)
}

// Interrupt ends the pulls that wait because a registry has asked them to, and those that would
// wait later: nobody should wait for them when the server stops.
func (c *Counts) Interrupt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.interrupted = true
	for p := range c.active {
		if p.Throttled != "" {
			c.interrupt(p)
		}
	}
}

// interrupt ends a pull, with the lock held.
func (c *Counts) interrupt(p *Pull) {
	if cancel := c.active[p]; cancel != nil {
		cancel(fmt.Errorf("crius is stopping, and registry %s has asked to wait until %s: %w", p.Throttled, p.Until.Format(time.TimeOnly), fault.Unavailable))
	}
}

// note counts an event of the pull p. After it, coming blobs of the pull are still to come.
func (c *Counts) note(p *Pull, event types.ProgressProperties, coming int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.Bytes += int64(event.OffsetUpdate)
	if event.Event == Resumed {
		c.Resumed.Add(int64(event.OffsetUpdate))
		p.Resumed += int64(event.OffsetUpdate)
	} else {
		c.Bytes.Add(int64(event.OffsetUpdate))
	}
	switch event.Event {
	case types.ProgressEventNewArtifact:
		p.Blobs++
		p.Total += max(event.Artifact.Size, 0)
	case types.ProgressEventDone:
		c.Fetched.Add(1)
		p.Done++
	case types.ProgressEventSkipped:
		c.Present.Add(1)
	case Connected:
		p.Connections++
	case Disconnected:
		p.Connections--
	}
	p.Unpacking = max(p.Blobs-p.Done-coming, 0)
}

// Stop ends the watching. Call it when the library sends no more events.
func (w *Watchdog) Stop() {
	close(w.end)
	w.done.Wait()
	if w.ended != nil {
		w.ended()
	}
}

func (w *Watchdog) run() {
	idle, window := time.NewTimer(w.limit), time.NewTimer(w.limit)
	defer idle.Stop()
	defer window.Stop()
	if w.limit == 0 { // the others are never set
		idle.Stop()
		window.Stop()
	}
	var layers downloads
	var came int64 // in the window
	for {
		select {
		case <-w.end:
			for len(w.Events) > 0 { // nobody sends any more events
				w.note(&layers, <-w.Events)
			}
			return
		case event := <-w.Events:
			waited := layers.waiting() || w.asked()
			w.note(&layers, event)
			if w.limit == 0 {
				continue
			}
			idle.Reset(w.limit)
			came += worth(event)
			if !waited { // else nothing could have come
				came = worth(event)
				window.Reset(w.limit)
			}
		case <-idle.C:
			if w.waited() {
				came = 0
				window.Reset(w.limit)
			} else if layers.waiting() || w.asked() {
				w.cancel(w.counts.stalled(w.pull))
			}
			idle.Reset(w.limit)
		case <-window.C:
			if w.waited() {
				idle.Reset(w.limit)
			} else if (layers.waiting() || w.asked()) && came < w.least {
				w.cancel(ErrTooSlow)
			}
			came = 0
			window.Reset(w.limit)
		}
	}
}

func (w *Watchdog) waited() bool { return w.Waited != nil && w.Waited() }

// note counts an event, except that the copy of the image finds a layer that this pull has fetched.
func (w *Watchdog) note(layers *downloads, event types.ProgressProperties) {
	if event.Event == types.ProgressEventSkipped && layers.done[event.Artifact.Digest] {
		return
	}
	layers.note(event)
	w.counts.note(w.pull, event, len(layers.missing))
}

// discard receives events, so that the library does not block.
func (w *Watchdog) discard() {
	for {
		select {
		case <-w.Events:
		case <-w.end:
			return
		}
	}
}

// worth returns the bytes that an event counts for. A complete blob counts for more than its size:
// an image of many small blobs waits for answers, not for bytes.
func worth(event types.ProgressProperties) int64 {
	const perBlob = 64 << 10
	if event.Event == types.ProgressEventDone || event.Event == types.ProgressEventSkipped {
		return perBlob
	}
	return int64(event.OffsetUpdate)
}

// downloads tracks how many bytes of each blob are still to come.
type downloads struct {
	missing map[digest.Digest]int64 // nil until the first blob
	done    map[digest.Digest]bool  // that have been fetched
}

func (d *downloads) note(event types.ProgressProperties) {
	if d.missing == nil {
		d.missing, d.done = map[digest.Digest]int64{}, map[digest.Digest]bool{}
	}
	blob := event.Artifact.Digest
	switch event.Event {
	case types.ProgressEventNewArtifact:
		if event.Artifact.Size > 0 {
			d.missing[blob] = event.Artifact.Size
		}
	case types.ProgressEventRead, Resumed:
		if left := d.missing[blob] - int64(event.OffsetUpdate); left > 0 {
			d.missing[blob] = left
			return
		}
		delete(d.missing, blob)
	case Connected, Disconnected:
	case types.ProgressEventDone:
		d.done[blob] = true
		delete(d.missing, blob)
	default: // skipped
		delete(d.missing, blob)
	}
}

// waiting reports whether the registry owes bytes: of a blob or, before the first blob, of the
// documents that name the blobs.
func (d *downloads) waiting() bool { return d.missing == nil || len(d.missing) > 0 }
