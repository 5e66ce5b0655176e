package trace

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// slow is how long a step or a wait may take until the log reports it.
const slow = 30 * time.Second

// Waiting describes a wait: its name, which is fixed like that of a step, what it waits for, and
// when it ends at the latest.
type Waiting struct {
	Name    string
	For     string    // such as the address of a registry; empty: the name says it
	Until   time.Time // zero: the deadline of the context, if any
	Patient bool      // it may last: the log does not report it as slow
}

// Wait runs f, which waits for somebody else and changes nothing. While it runs, the wait is the
// present step of the operation of ctx; observers and hooks do not see it.
func Wait(ctx context.Context, w Waiting, f func(context.Context) error) error {
	o, _ := ctx.Value(operationKey{}).(*operation)
	if o == nil {
		return f(ctx)
	}
	return o.enter(ctx, w, f)
}

// For reports that the present step of the operation of ctx waits for whom, until the returned
// function is called or the deadline of ctx.
func For(ctx context.Context, whom string) (done func()) {
	o, _ := ctx.Value(operationKey{}).(*operation)
	if o == nil {
		return func() {}
	}
	s := o.push(ctx, Waiting{For: whom})
	stop := func() {}
	if s.alone { // otherwise the step around it has a warning
		stop = o.warnIfSlow(ctx, s)
	}
	return func() { stop(); o.pop(s, ctx.Err()) } // an ended context has ended the wait
}

// enter runs f with w as the present step.
func (o *operation) enter(ctx context.Context, w Waiting, f func(context.Context) error) (err error) {
	s := o.push(ctx, w)
	defer func() { o.pop(s, err) }() // also after a panic
	if !w.Patient {
		defer o.warnIfSlow(ctx, s)()
	}
	return f(ctx)
}

// push makes w the present step. Without a name it has that of the step before.
func (o *operation) push(ctx context.Context, w Waiting) *stepped {
	if deadline, ok := ctx.Deadline(); ok && w.Until.IsZero() {
		w.Until = deadline
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	s := &stepped{Waiting: w, began: time.Now()}
	if n := len(o.steps); w.Name == "" && n > 0 {
		s.Name, s.began = o.steps[n-1].Name, o.steps[n-1].began
	} else if w.Name == "" {
		s.Name, s.alone = "wait for "+w.For, true
	}
	o.steps = append(o.steps, s)
	return s
}

func (o *operation) pop(s *stepped, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.steps = slices.DeleteFunc(o.steps, func(other *stepped) bool { return other == s })
	if o.hit == nil && limited(err) {
		o.hit = s
	}
}

// warnIfSlow logs once if a step takes long, unless a step within it has its own warning.
func (o *operation) warnIfSlow(ctx context.Context, s *stepped) (stop func()) {
	timer := time.AfterFunc(slow, func() {
		if o.innermost(s) {
			w := o.work(time.Now())
			slog.WarnContext(ctx, "step takes long, still waiting", w.attrs()...)
		}
	})
	return func() { timer.Stop() }
}

// innermost reports whether s is the last step that has a name of its own.
func (o *operation) innermost(s *stepped) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	i := slices.Index(o.steps, s)
	return i >= 0 && !slices.ContainsFunc(o.steps[i+1:], func(within *stepped) bool { return within.Name != s.Name })
}

// attrs returns what is known of the work, for the log.
func (w Work) attrs() []any {
	attrs := []any{"operation", w.Operation, "object", w.Object, "took", w.Took.Round(time.Millisecond)}
	add := func(key string, value any, known bool) {
		if known {
			attrs = append(attrs, key, value)
		}
	}
	add("object_name", w.Name, w.Name != "")
	add("step", w.Step, w.Step != "")
	add("waits_for", w.WaitsFor, w.WaitsFor != "")
	add("until", w.Until.Format(time.RFC3339), !w.Until.IsZero())
	return attrs
}

// reportLimit logs that a time limit of crius has ended the operation: its callers, whose limits
// do not reach it, may be gone.
func (o *operation) reportLimit(ctx context.Context, err error) {
	if !limited(err) || ctx.Value(callersLimitKey{}) != nil {
		return
	}
	w := o.work(time.Now())
	o.mu.Lock()
	if o.hit != nil {
		w.Step, w.WaitsFor, w.Until = o.hit.Name, o.hit.For, time.Time{}
	}
	o.mu.Unlock()
	slog.WarnContext(ctx, "operation ended by a time limit", append(w.attrs(), "err", err)...)
}

func limited(err error) bool {
	return errors.Is(err, fault.Timeout) || errors.Is(err, context.DeadlineExceeded)
}

type callersLimitKey struct{}

// CallersLimit returns a context for an operation whose time limit its caller has chosen, so that
// reaching it is no news.
func CallersLimit(ctx context.Context) context.Context {
	return context.WithValue(ctx, callersLimitKey{}, true)
}
