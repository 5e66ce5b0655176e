package storage

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
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
func TestWatchdogLetsUnpacking(t *testing.T) {
	t.Parallel()
	synctest.Test(t, watchdogLetsUnpacking)
}

func watchdogLetsUnpacking(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	w := newWatchdog(new(PullCounts), "image", 30*time.Millisecond, cancel)
	defer w.stop()
	w.events <- types.ProgressProperties{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: "a", Size: 10}}
	w.events <- types.ProgressProperties{Event: types.ProgressEventRead, Artifact: types.BlobInfo{Digest: "a", Size: 10}, OffsetUpdate: 10}
	select {
	case <-ctx.Done():
		t.Error("cancelled while it unpacked")
	case <-time.After(300 * time.Millisecond):
	}
	w.events <- types.ProgressProperties{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: "b", Size: 10}}
	select {
	case <-ctx.Done():
		if err := causeOf(ctx, ctx.Err()); !errors.Is(err, fault.Timeout) || !errors.Is(err, errStalled) {
			t.Errorf("cause %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("not cancelled while a byte was due")
	}
}

// Without a limit nothing is ever called off, and it is counted all the same.
func TestNoLimit(t *testing.T) {
	counts := new(PullCounts)
	w := newWatchdog(counts, "image", 0, func(cause error) { t.Error(cause) })
	for _, e := range []types.ProgressProperties{
		{Event: types.ProgressEventNewArtifact, Artifact: types.BlobInfo{Digest: "a", Size: 10}},
		{Event: types.ProgressEventRead, Artifact: types.BlobInfo{Digest: "a", Size: 10}, OffsetUpdate: 7},
		{Event: types.ProgressEventDone, Artifact: types.BlobInfo{Digest: "a", Size: 10}, OffsetUpdate: 3},
		{Event: types.ProgressEventSkipped, Artifact: types.BlobInfo{Digest: "b", Size: 10}},
	} {
		w.events <- e
	}
	want := PullProgress{Image: "image", Bytes: 10, Total: 10, Blobs: 1, Done: 1}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		active := counts.Active()
		if len(active) == 1 {
			active[0].Since = time.Time{}
			if active[0] == want && counts.Present.Load() == 1 {
				break
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("under way: %+v", active)
		}
	}
	w.stop()
	if active := counts.Active(); len(active) != 0 {
		t.Errorf("still under way: %+v", active)
	}
	if b, f, p := counts.Bytes.Load(), counts.Fetched.Load(), counts.Present.Load(); b != 10 || f != 1 || p != 1 {
		t.Errorf("counted %d bytes, %d fetched, %d present", b, f, p)
	}
}
