package object

import (
	"context"
	"errors"
	"slices"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/view"
)

type state struct{ Phase records.Phase }

func (s state) Reached() records.Phase { return s.Phase }

type object = Object[state, state, string]

func newObject(t *testing.T) (o *object, events *[]cri.ContainerEventType) {
	t.Helper()
	events = new([]cri.ContainerEventType)
	o = &object{ID: "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", Kind: Kind[state, state, string]{
		Records:    record.At[state](t.TempDir(), "state.json", 1),
		Record:     func(now *state) *state { return now },
		Show:       func(now *state) *string { return new(string(now.Phase)) },
		Stage:      func() (now, skip view.Stage) { return view.Stopped, view.Started },
		Emit:       func(kind cri.ContainerEventType) { *events = append(*events, kind) },
		Unrecorded: func(_ context.Context, err error) { t.Log(err) },
	}}
	return o, events
}

func TestRecordFollowsState(t *testing.T) {
	t.Parallel()
	o, _ := newObject(t)
	if err := o.Kind.Records.Make(); err != nil {
		t.Fatal(err)
	}
	o.Change(func(now *state) { now.Phase = records.Ready })
	if err := errors.Join(o.Put(t.Context()), o.Sync()); err != nil {
		t.Fatal(err)
	}
	if rec, err := o.Kind.Records.Get(o.ID); err != nil || rec.Phase != records.Ready {
		t.Errorf("on record: %v, %v", rec, err)
	}
	o.Change(func(now *state) { now.Phase = records.Removing })
	if !o.Note(t.Context()) {
		t.Error("the removal is not noted")
	}
	if err := o.Forget(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Kind.Records.Get(o.ID); !errors.Is(err, fault.NotFound) {
		t.Errorf("after it was forgotten: %v", err)
	}
}

// An end goes on although its record cannot be written.
func TestUnrecordedEnd(t *testing.T) {
	t.Parallel()
	o, _ := newObject(t) // whose directory of records is not there
	o.Kind.Records = record.At[state]("/proc/none", "state.json", 1)
	var unrecorded error
	o.Kind.Unrecorded = func(_ context.Context, err error) { unrecorded = err }
	if o.Note(t.Context()) || unrecorded == nil {
		t.Errorf("noted, or not logged: %v", unrecorded)
	}
}

func TestViewIsOfTheLastPublish(t *testing.T) {
	t.Parallel()
	o, _ := newObject(t)
	if o.View() != nil {
		t.Errorf("%s before it is published", *o.View())
	}
	o.Change(func(now *state) { now.Phase = records.Created })
	o.Publish()
	o.Change(func(now *state) { now.Phase = records.Started })
	if *o.View() != string(records.Created) || o.Now().Phase != records.Started {
		t.Errorf("%s is shown of an object that is %s", *o.View(), o.Now().Phase)
	}
}

func TestTellSkipsAStage(t *testing.T) {
	t.Parallel()
	o, events := newObject(t)
	o.Tell()
	o.Tell()
	want := []cri.ContainerEventType{cri.ContainerEventType_CONTAINER_CREATED_EVENT, cri.ContainerEventType_CONTAINER_STOPPED_EVENT}
	if !slices.Equal(*events, want) {
		t.Errorf("%v, want %v", *events, want)
	}
}

func TestFinishLeavesARemovedObjectAlone(t *testing.T) {
	t.Parallel()
	o, _ := newObject(t)
	work := func(context.Context) error {
		if o.WhileIdle(func() { t.Error("a look at an object that a verb changes") }) {
			t.Error("it is idle amid a verb")
		}
		return fault.Internal
	}
	if err := o.Finish(t.Context(), work); !errors.Is(err, fault.Internal) {
		t.Error(err)
	}
	o.Change(func(now *state) { now.Phase = records.Removing })
	if err := o.Finish(t.Context(), work); err != nil {
		t.Error(err)
	}
	looked := false
	if !o.WhileIdle(func() { looked = true }) || !looked {
		t.Error("an idle object is not looked at")
	}
}
