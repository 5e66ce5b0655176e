// Package object holds what a pod and a container have in common: a state that verbs change
// in one step, the record that says how far they have come, the view that readers get, and
// the lock that verbs hold. It does not know what a pod or a container is made of; see [Kind].
package object

import (
	"context"
	"sync"
	"sync/atomic"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/guarded"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/view"
)

// State is what changes of an object.
type State interface {
	// Reached returns the phase that the object is in.
	Reached() records.Phase
}

// Kind is how pods and containers differ. S is the state of the object, R its record, V its
// view.
type Kind[S State, R, V any] struct {
	Records *record.Dir[R]
	// Record returns what is to be on record of an object in this state.
	Record func(now *S) *R
	// Show returns the view of an object in this state. It must not block.
	Show func(now *S) *V
	// Stage returns the stage of its life that the object has reached, and a stage that it
	// has skipped, if any.
	Stage func() (now, skip view.Stage)
	// Emit sends an event of the object.
	Emit func(cri.ContainerEventType)
	// Unrecorded logs that the end of the object is not on record.
	Unrecorded func(ctx context.Context, err error)
}

// Object is a pod or a container. Its zero value has the zero state and no view.
type Object[S State, R, V any] struct {
	ID   string
	Kind Kind[S, R, V]

	// Life is held by the verb that changes the object, for as long as it takes.
	Life sync.Mutex

	state    guarded.Value[S]
	view     atomic.Pointer[V]
	progress view.Progress
}

// Now returns the state of the object at this moment.
func (o *Object[S, R, V]) Now() S { return o.state.Now() }

// Change changes the state in one step; change must not block.
func (o *Object[S, R, V]) Change(change func(now *S)) { o.state.Change(change) }

// Put writes the record.
func (o *Object[S, R, V]) Put(ctx context.Context) error {
	now := o.Now()
	return o.Kind.Records.Put(ctx, o.ID, o.Kind.Record(&now))
}

// Note writes the record of an end that has begun, and reports whether it did. A disk that is
// full or read-only does not hold up the end, which is what makes room. If the server dies
// meanwhile, the next one finds things already gone, or ends the object once more.
func (o *Object[S, R, V]) Note(ctx context.Context) (noted bool) {
	err := o.Put(ctx)
	if err != nil {
		o.Kind.Unrecorded(ctx, err)
	}
	return err == nil
}

// Sync returns when the record is on the disk.
func (o *Object[S, R, V]) Sync() error { return o.Kind.Records.SyncOne(o.ID) }

// Forget deletes the record.
func (o *Object[S, R, V]) Forget(ctx context.Context) error { return o.Kind.Records.Delete(ctx, o.ID) }

// Publish shows readers the object as it is now. The object does not change meanwhile, so an
// older view never replaces a newer one.
func (o *Object[S, R, V]) Publish() {
	o.Change(func(now *S) { o.view.Store(o.Kind.Show(now)) })
}

// View returns what readers see of the object; nil before the first Publish.
func (o *Object[S, R, V]) View() *V { return o.view.Load() }

// Tell emits events of the stages that the object has reached since the last call.
func (o *Object[S, R, V]) Tell() {
	now, skip := o.Kind.Stage()
	o.progress.Reach(now, skip, o.Kind.Emit)
}

// LockLife locks Life. If a verb holds it, that is what the operation of ctx waits for.
func (o *Object[S, R, V]) LockLife(ctx context.Context) {
	if o.Life.TryLock() {
		return
	}
	wait := trace.Waiting{Name: "wait for other operation", For: "another operation on " + o.ID}
	_ = trace.Wait(ctx, wait, func(context.Context) error { o.Life.Lock(); return nil })
}

// Finish calls work with Life held, unless the object is being removed: the removal has taken
// over then.
func (o *Object[S, R, V]) Finish(ctx context.Context, work func(context.Context) error) error {
	o.LockLife(ctx)
	defer o.Life.Unlock()
	if o.Now().Reached() == records.Removing {
		return nil
	}
	return work(ctx)
}

// WhileIdle calls look with Life held, and reports whether it did: it does not wait for a verb
// that is at work.
func (o *Object[S, R, V]) WhileIdle(look func()) bool {
	if !o.Life.TryLock() {
		return false
	}
	defer o.Life.Unlock()
	look()
	return true
}
