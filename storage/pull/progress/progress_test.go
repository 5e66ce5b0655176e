package progress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestDownloads(t *testing.T) {
	event := func(kind types.ProgressEvent, blob string, size int64, read uint64) types.ProgressProperties {
		return types.ProgressProperties{
			Event:        kind,
			Artifact:     types.BlobInfo{Digest: digest.Digest(blob), Size: size},
			OffsetUpdate: read,
		}
	}
	var d downloads
	if !d.waiting() {
		t.Error("before the first blob the registry owes documents")
	}
	if d.note(event(Waiting, "a", 10, 0)); d.waiting() {
		t.Error("the registry owes what another pull fetches")
	}
	for _, step := range []struct {
		event types.ProgressProperties
		want  bool
	}{
		{event(types.ProgressEventSkipped, "a", 10, 0), false},
		{event(types.ProgressEventNewArtifact, "b", 10, 0), true},
		{event(types.ProgressEventRead, "b", 10, 4), true},
		{event(types.ProgressEventNewArtifact, "c", 10, 0), true},
		{event(types.ProgressEventRead, "b", 10, 6), true},   // b is here and may be unpacked
		{event(types.ProgressEventRead, "c", 10, 10), false}, // so is c: nothing is owed
		{event(types.ProgressEventDone, "b", 10, 0), false},
		{event(types.ProgressEventNewArtifact, "f", 10, 0), true},
		{event(Resumed, "f", 10, 4), true},
		{event(types.ProgressEventRead, "f", 10, 6), false},        // the rest
		{event(types.ProgressEventNewArtifact, "d", -1, 0), false}, // a size that nobody knows is not waited for
		{event(types.ProgressEventRead, "d", -1, 5), false},
		{event(types.ProgressEventNewArtifact, "e", 10, 0), true},
		{event(types.ProgressEventDone, "e", 10, 10), false},
	} {
		if d.note(step.event); d.waiting() != step.want {
			t.Errorf("after %+v: waiting %t", step.event, d.waiting())
		}
	}
}

// Unpacking may take longer than any byte may be late.
func TestWatchdogIgnoresUnpackingTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, watchdogLetsUnpacking)
}

func watchdogLetsUnpacking(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	w := New(new(Counts), "image", 30*time.Millisecond, 0, notAsked, cancel).Start(t.Context())
	defer w.Stop()
	w.Events <- types.ProgressProperties{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: "a", Size: 10}}
	w.Events <- types.ProgressProperties{Event: types.ProgressEventRead, Artifact: types.BlobInfo{Digest: "a", Size: 10}, OffsetUpdate: 10}
	select {
	case <-ctx.Done():
		t.Error("cancelled while it unpacked")
	case <-time.After(300 * time.Millisecond):
	}
	w.Events <- types.ProgressProperties{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: "b", Size: 10}}
	select {
	case <-ctx.Done():
		if err := CauseOf(ctx, ctx.Err()); !errors.Is(err, fault.Timeout) || !errors.Is(err, ErrStalled) {
			t.Errorf("cause %v", err)
		}
	case <-time.After(wait.Limit):
		t.Error("not cancelled while a byte was due")
	}
}

// Without a limit nothing is ever called off, and it is counted all the same.
func TestNoLimit(t *testing.T) {
	counts := new(Counts)
	w := New(counts, "image", 0, 1<<10, notAsked, func(cause error) { t.Error(cause) }).Start(t.Context())
	for _, e := range []types.ProgressProperties{
		{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: "a", Size: 10}},
		{Event: Resumed, Artifact: types.BlobInfo{Digest: "a", Size: 10}, OffsetUpdate: 2},
		{Event: types.ProgressEventRead, Artifact: types.BlobInfo{Digest: "a", Size: 10}, OffsetUpdate: 5},
		{Event: types.ProgressEventDone, Artifact: types.BlobInfo{Digest: "a", Size: 10}, OffsetUpdate: 3},
		{Event: types.ProgressEventSkipped, Artifact: types.BlobInfo{Digest: "a", Size: 10}}, // which is found where it was unpacked
		{Event: types.ProgressEventSkipped, Artifact: types.BlobInfo{Digest: "b", Size: 10}},
		{Event: Connections(1)}, {Event: Connections(1)}, {Event: Connections(1)}, {Event: Connections(-1)},
	} {
		w.Events <- e
	}
	want := Pull{Image: "image", Bytes: 10, Resumed: 2, Total: 10, Blobs: 1, Done: 1, Connections: 2}
	var active []Pull
	if !wait.Until(t.Context(), func() bool {
		if active = counts.Active(); len(active) == 1 {
			active[0].Since = time.Time{}
		}
		return len(active) == 1 && reflect.DeepEqual(active[0], want) && counts.Present.Load() == 1
	}) {
		t.Fatalf("under way: %+v", active)
	}
	w.Stop()
	if active := counts.Active(); len(active) != 0 {
		t.Errorf("still under way: %+v", active)
	}
	if b, r, f, p := counts.Bytes.Load(), counts.Resumed.Load(), counts.Fetched.Load(), counts.Present.Load(); b != 8 || r != 2 || f != 1 || p != 1 {
		t.Errorf("counted %d bytes, %d resumed, %d fetched, %d present", b, r, f, p)
	}
}

// What has come and is not done is being unpacked.
func TestUnpackingIsCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		counts := new(Counts)
		w := New(counts, "image", 0, 0, notAsked, func(cause error) { t.Error(cause) }).Start(t.Context())
		defer w.Stop()
		event := func(kind types.ProgressEvent, blob string, read uint64) {
			w.Events <- types.ProgressProperties{Event: kind, Artifact: types.BlobInfo{Digest: digest.Digest(blob), Size: 10}, OffsetUpdate: read}
			synctest.Wait()
		}
		for _, step := range []struct {
			kind types.ProgressEvent
			blob string
			read uint64
			want int
		}{
			{types.ProgressEventSkipped, "present", 0, 0},
			{types.ProgressEventNewArtifact, "a", 0, 0},
			{types.ProgressEventNewArtifact, "b", 0, 0},
			{types.ProgressEventRead, "a", 9, 0},
			{types.ProgressEventRead, "a", 1, 1},
			{types.ProgressEventRead, "b", 10, 2},
			{types.ProgressEventDone, "a", 0, 1},
			{types.ProgressEventDone, "b", 0, 0},
		} {
			event(step.kind, step.blob, step.read)
			if got := counts.Active()[0].Unpacking; got != step.want {
				t.Errorf("after event %v of %s: %d are being unpacked, want %d", step.kind, step.blob, got, step.want)
			}
		}
	})
}

// A registry that drips does not hold a pull for ever; a slow link does no harm,
// nor do pauses in which nothing is due.
func TestWatchdogEndsPullsBelowTheRate(t *testing.T) {
	t.Parallel()
	const rate, window = 1 << 10, 5 * time.Minute
	blob := func(kind types.ProgressEvent, name string, read uint64) types.ProgressProperties {
		return types.ProgressProperties{Event: kind, Artifact: types.BlobInfo{Digest: digest.Digest(name), Size: 1 << 40}, OffsetUpdate: read}
	}
	for name, c := range map[string]struct {
		every time.Duration
		event func(i int) []types.ProgressProperties
		want  error
	}{
		"drips": {time.Minute, func(int) []types.ProgressProperties {
			return []types.ProgressProperties{blob(types.ProgressEventRead, "a", 1)}
		}, ErrTooSlow},
		"too slow in sum": {time.Minute, func(i int) []types.ProgressProperties {
			return []types.ProgressProperties{blob(types.ProgressEventRead, "a", 20*rate), blob(types.ProgressEventRead, "b", 20*rate)}
		}, ErrTooSlow},
		"slow link": {time.Minute, func(int) []types.ProgressProperties {
			return []types.ProgressProperties{blob(types.ProgressEventRead, "a", 70*rate)}
		}, nil},
		"uneven link": {4 * time.Minute, func(int) []types.ProgressProperties {
			return []types.ProgressProperties{blob(types.ProgressEventRead, "a", 600*rate)}
		}, nil},
		"small blobs": {time.Minute, func(i int) []types.ProgressProperties {
			name := fmt.Sprint("small", i)
			return []types.ProgressProperties{blob(types.ProgressEventNewArtifact, name, 0), blob(types.ProgressEventDone, name, 100)}
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				w := New(new(Counts), "image", window, rate, notAsked, cancel).Start(t.Context())
				defer w.Stop()
				time.Sleep(time.Second) // no event at the moment at which a window ends
				w.Events <- blob(types.ProgressEventNewArtifact, "a", 0)
				w.Events <- blob(types.ProgressEventNewArtifact, "b", 0)
				for i := range 60 {
					for _, event := range c.event(i) {
						w.Events <- event
					}
					time.Sleep(c.every)
				}
				if cause := context.Cause(ctx); !errors.Is(cause, c.want) || c.want == nil && cause != nil {
					t.Errorf("cancelled for %v, want %v", cause, c.want)
				}
			})
		})
	}
}

// Unpacking is no download: downloads after it have a window of their own.
func TestRateIsMeasuredWhileBytesAreDue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		w := New(new(Counts), "image", time.Minute, 1<<10, notAsked, cancel).Start(t.Context())
		defer w.Stop()
		for i := range 10 {
			name := digest.Digest(fmt.Sprint(i))
			w.Events <- types.ProgressProperties{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: name, Size: 100}}
			w.Events <- types.ProgressProperties{Event: types.ProgressEventRead, Artifact: types.BlobInfo{Digest: name, Size: 100}, OffsetUpdate: 100}
			time.Sleep(time.Minute + 50*time.Second) // unpacking
		}
		if cause := context.Cause(ctx); cause != nil {
			t.Errorf("cancelled for %v", cause)
		}
	})
}

// An answer is waited for whatever the manifest says of its size.
func TestWatchdogWaitsForAnswers(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	w := New(new(Counts), "image", 30*time.Millisecond, 0, func() bool { return true }, cancel).Start(t.Context())
	defer w.Stop()
	w.Events <- types.ProgressProperties{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: "a", Size: -1}}
	<-ctx.Done()
	if err := CauseOf(ctx, ctx.Err()); !errors.Is(err, fault.Timeout) || !errors.Is(err, ErrStalled) {
		t.Errorf("cause %v", err)
	}
}

func notAsked() bool { return false }

// A pull that a registry has asked to wait, for longer than it may take, does not end as one to which nothing came.
func TestCauseOfAThrottledPull(t *testing.T) {
	t.Parallel()
	var counts Counts
	ctx, end := counts.Begin(t.Context(), "r.test/app:1")
	defer end()
	stalled, cancel := context.WithCancelCause(ctx)
	cancel(ErrStalled)
	if err := counts.CauseOf(stalled, context.Canceled); !errors.Is(err, ErrStalled) || !errors.Is(err, fault.Timeout) {
		t.Errorf("nobody has asked to wait: %v", err)
	}
	done := counts.Throttle(ctx, "r.test", time.Now().Add(time.Hour))
	if err := counts.CauseOf(stalled, context.Canceled); !errors.Is(err, pullerror.ErrThrottled) || !errors.Is(err, fault.Unavailable) || errors.Is(err, ErrStalled) {
		t.Errorf("asked to wait for an hour: %v", err)
	}
	if err := counts.CauseOf(ctx, io.EOF); !errors.Is(err, io.EOF) {
		t.Errorf("the pull goes on: %v", err)
	}
	done()
	counts.Throttle(ctx, "r.test", time.Now().Add(-time.Second))
	if err := counts.CauseOf(stalled, context.Canceled); !errors.Is(err, ErrStalled) {
		t.Errorf("the wait is over: %v", err)
	}
}
