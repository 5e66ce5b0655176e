// Package trace follows the work of the server: which operations are under way,
// the present step of each and since when, and how long everything took.
// Observers turn that into metrics and spans.
package trace

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crius-run/crius/internal/panics"
)

// Kind is the kind of work observed.
type Kind int

// Kinds of work.
const (
	RPC       Kind = iota // a CRI call, while its caller is served
	Operation             // work on one object, whether or not a caller waits for it
	Step                  // a part of an operation
)

// Observer observes calls, operations and steps. Begin is called when one
// begins, and may add values to its context; the function that it returns is
// called once, when the work has ended. Only operations have an object.
type Observer interface {
	Begin(ctx context.Context, kind Kind, name, object string) (context.Context, func(err error))
}

// Point is the edge of a step: every side effect of an operation is a step, so
// the code between two points changes nothing outside of memory.
type Point struct {
	Operation, Object, Step string

	After bool // the step has run; otherwise it is about to
}

// Hook is called at every point. Its error becomes the step's; at the first
// edge the step is not run then. Tests kill and fail there.
type Hook func(Point) error

// Tracer knows the operations under way. The zero value is ready, and a nil
// Tracer does nothing.
type Tracer struct {
	// Hook may be set before the first operation; nil: no hook.
	Hook Hook

	observers []Observer
	naming    atomic.Pointer[func(object string) string]

	mu     sync.Mutex
	active map[*operation]bool
}

// New returns a Tracer with observers.
func New(observers ...Observer) *Tracer { return &Tracer{observers: observers} }

// SetNames gives the tracer a function that returns the name by which people know an object, such
// as the namespace and name of a pod, and "" if the object has no other name.
func (t *Tracer) SetNames(nameOf func(object string) string) {
	if t != nil {
		t.naming.Store(&nameOf)
	}
}

func (t *Tracer) nameOf(object string) string {
	if nameOf := t.naming.Load(); nameOf != nil {
		return (*nameOf)(object)
	}
	return ""
}

// operation is a piece of work on one object.
type operation struct {
	tracer *Tracer
	name   string
	object string
	began  time.Time

	mu    sync.Mutex
	steps []*stepped // under way, each within the one before, unless several run concurrently
	hit   *stepped   // the first one that ended at a time limit
}

// stepped is a step or a wait under way.
type stepped struct {
	Waiting
	began time.Time
	alone bool // it has no name of its own, nor a step around it that has one
}

type operationKey struct{}

// Do runs f as an operation on an object, such as a pod's name. It is cheap
// enough for every call of every verb. A panic in f, or in a step, becomes its
// error (fault.Internal), so that the usual cleanup after an error happens.
func (t *Tracer) Do(ctx context.Context, name, object string, f func(context.Context) error) error {
	if t == nil {
		return f(ctx)
	}
	o := &operation{tracer: t, name: name, object: object, began: time.Now()}
	t.mu.Lock()
	if t.active == nil {
		t.active = map[*operation]bool{}
	}
	t.active[o] = true
	t.mu.Unlock()
	defer o.leave()
	err := t.observed(context.WithValue(ctx, operationKey{}, o), Operation, name, object, f)
	o.reportLimit(ctx, err)
	return err
}

// Call runs f, which answers a call of a CRI method.
func (t *Tracer) Call(ctx context.Context, method string, f func(context.Context) error) error {
	if t == nil {
		return f(ctx)
	}
	return t.observed(ctx, RPC, method, "", f)
}

func (o *operation) leave() {
	o.tracer.mu.Lock()
	defer o.tracer.mu.Unlock()
	delete(o.tracer.active, o)
}

// Leave removes the operation of ctx from those in progress: the rest of it
// only waits for something else, however long.
func Leave(ctx context.Context) {
	if o, _ := ctx.Value(operationKey{}).(*operation); o != nil {
		o.leave()
	}
}

// Do runs f as a step of the operation of ctx.
func Do(ctx context.Context, name string, f func(context.Context) error) error {
	return do(ctx, Waiting{Name: name}, f)
}

// Long is Do for a step that may take as long as it needs: a copy that moves on, for instance.
// The log does not report it as slow, but reports slow waits and steps within it.
func Long(ctx context.Context, name string, f func(context.Context) error) error {
	return do(ctx, Waiting{Name: name, Patient: true}, f)
}

func do(ctx context.Context, w Waiting, f func(context.Context) error) error {
	o, _ := ctx.Value(operationKey{}).(*operation)
	if o == nil {
		return f(ctx)
	}
	return o.enter(ctx, w, func(ctx context.Context) error {
		return o.tracer.observed(ctx, Step, w.Name, "", func(ctx context.Context) error { return o.step(ctx, w.Name, f) })
	})
}

// step runs f between its two points.
func (o *operation) step(ctx context.Context, name string, f func(context.Context) error) error {
	hook := o.tracer.Hook
	if hook == nil {
		return f(ctx)
	}
	at := Point{Operation: o.name, Object: o.object, Step: name}
	if err := hook(at); err != nil {
		return err
	}
	at.After = true
	return errors.Join(f(ctx), hook(at))
}

// Get is Do for a step with a result.
func Get[T any](ctx context.Context, name string, f func(context.Context) (T, error)) (result T, err error) {
	err = Do(ctx, name, func(ctx context.Context) error {
		result, err = f(ctx)
		return err
	})
	return result, err
}

// Call is Do for a function without a context.
func Call(ctx context.Context, name string, f func() error) error {
	return Do(ctx, name, func(context.Context) error { return f() })
}

func (t *Tracer) observed(ctx context.Context, kind Kind, name, object string, f func(context.Context) error) (err error) {
	for _, observer := range t.observers {
		inner, end := observer.Begin(ctx, kind, name, object)
		ctx = inner //nolint:fatcontext // an observer finds what those before it have added
		defer func() { end(err) }()
	}
	return panics.Do(ctx, name, func() error { return f(ctx) })
}

// Work is an operation under way.
type Work struct {
	Operation string        `json:"operation"`
	Object    string        `json:"object"`
	Name      string        `json:"name,omitempty"` // of the object, if Object is an id
	Took      time.Duration `json:"took"`
	Step      string        `json:"step,omitempty"` // the one that began last; empty: between two steps
	StepTook  time.Duration `json:"stepTook,omitempty"`
	WaitsFor  string        `json:"waitsFor,omitempty"` // what the step waits for, if known
	Until     time.Time     `json:"until,omitzero"`     // when the step ends at the latest; zero: unknown
}

// Active lists the operations under way, the longest-running first.
func (t *Tracer) Active() []Work {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	operations := make([]*operation, 0, len(t.active))
	for o := range t.active {
		operations = append(operations, o)
	}
	t.mu.Unlock()
	now := time.Now()
	list := make([]Work, len(operations))
	for i, o := range operations {
		list[i] = o.work(now)
	}
	slices.SortFunc(list, func(a, b Work) int { return cmp.Compare(b.Took, a.Took) })
	return list
}

func (o *operation) work(now time.Time) Work {
	w := Work{Operation: o.name, Object: o.object, Name: o.tracer.nameOf(o.object), Took: now.Sub(o.began)}
	o.mu.Lock()
	defer o.mu.Unlock()
	if n := len(o.steps); n > 0 {
		last := o.steps[n-1]
		w.Step, w.StepTook, w.WaitsFor, w.Until = last.Name, now.Sub(last.began), last.For, last.Until
	}
	return w
}
