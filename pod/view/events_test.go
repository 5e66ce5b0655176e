package view

import (
	"context"
	"errors"
	"slices"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func listen(t *testing.T, h *Hub) *Listener {
	t.Helper()
	l, err := h.Listen()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

// A listener that does not take its events holds up nobody, and learns that it has
// missed some.
func TestSlowListener(t *testing.T) {
	var h Hub
	slow, quick := listen(t, &h), listen(t, &h)
	for range maxQueue + 2 {
		h.Emit(func() *Event { return &Event{} })
		if _, err := quick.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	taken := 0
	for ; ; taken++ {
		if _, err := slow.Next(t.Context()); errors.Is(err, fault.Exhausted) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if taken != maxQueue {
		t.Errorf("%d events before the error, want %d", taken, maxQueue)
	}
	if dropped := h.Dropped(); dropped != 2 {
		t.Errorf("%d events dropped, want 2", dropped)
	}
	h.Close(fault.Unavailable)
	h.Emit(func() *Event { return &Event{} })
	if dropped := h.Dropped(); dropped != 3 { // not that of the other one, which was not too slow
		t.Errorf("%d events dropped, want 3", dropped)
	}
}

func TestListenersAreBounded(t *testing.T) {
	var h Hub
	var all []*Listener
	for range maxListeners {
		all = append(all, listen(t, &h))
	}
	if _, err := h.Listen(); !errors.Is(err, fault.Exhausted) {
		t.Errorf("one too many: %v", err)
	}
	all[0].Close()
	last := listen(t, &h)
	done := make(chan error, 1)
	go func() { _, err := last.Next(context.Background()); done <- err }()
	h.Close(fault.Unavailable)
	if err := <-done; !errors.Is(err, fault.Unavailable) {
		t.Errorf("a listener of a closed hub: %v", err)
	}
	if _, err := h.Listen(); !errors.Is(err, fault.Unavailable) {
		t.Errorf("listen at a closed hub: %v", err)
	}
}

// Nobody describes an event that nobody listens for.
func TestEmitWithoutListeners(t *testing.T) {
	var h Hub
	h.Emit(func() *Event { t.Error("an event was described"); return nil })
}

func TestProgressReportsEachStageOnce(t *testing.T) {
	var p Progress
	var got []cri.ContainerEventType
	reach := func(now, skip Stage) {
		p.Reach(now, skip, func(kind cri.ContainerEventType) { got = append(got, kind) })
	}
	reach(Created, Unknown)
	reach(Created, Unknown)
	reach(Stopped, Started)
	reach(Started, Unknown) // late
	reach(Deleted, Unknown)
	want := []cri.ContainerEventType{
		cri.ContainerEventType_CONTAINER_CREATED_EVENT, cri.ContainerEventType_CONTAINER_STOPPED_EVENT, cri.ContainerEventType_CONTAINER_DELETED_EVENT,
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
