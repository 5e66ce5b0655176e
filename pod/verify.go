package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/storage"
)

// This file and its neighbours compare what is on record with what is there.
// They look without a lock first, at everything at once. What seems wrong counts
// only if it still is when the object's life lock is held: then no verb is at
// work on it. A repair is a way back that exists already; there is none of its
// own.

// Finding is something that is not as the records say, or that none knows of.
type Finding struct {
	Object   string `json:"object"`           // "pod ID", "container ID", or what it is
	Wrong    string `json:"wrong"`            // what is the case
	Remedy   string `json:"remedy,omitempty"` // what a repair does, or has done; empty: it can do nothing
	Advice   string `json:"advice,omitempty"` // what a person can do
	Repaired bool   `json:"repaired"`
	Err      string `json:"error,omitempty"` // why the repair failed
}

// problem is a Finding to be.
type problem struct {
	wrong  string
	remedy remedy
	advice string
}

// remedy is what can be done about a problem. Those of one object that have the
// same text are one.
type remedy struct {
	text string
	do   func(context.Context) error
}

// answerTime is how long a monitor may take to answer.
const answerTime = 5 * time.Second

// verification is one comparison.
type verification struct {
	*Engine
	repair bool
	loose  []storage.Defect // of the image store itself

	mu       sync.Mutex
	findings []Finding
}

// Verify compares the node with its records and says what is wrong; with repair
// it also does something about it. It may be called at any time beside the
// verbs. The error says what could not be looked at; the findings are true all
// the same. One check is at work at a time, and none for longer than ctx: what
// hangs then is left behind, and repairs nothing any more.
func (e *Engine) Verify(ctx context.Context, repair bool) ([]Finding, error) {
	select {
	case e.verifying <- struct{}{}:
		defer func() { <-e.verifying }()
	case <-ctx.Done():
		return nil, fmt.Errorf("another check is running: %w", context.Cause(ctx))
	}
	v := &verification{Engine: e, repair: repair}
	done := make(chan error, 1)
	e.background.Go(func() { done <- v.look(ctx) })
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return v.found(), err
}

// look compares everything.
func (v *verification) look(ctx context.Context) error {
	var errs []error
	for _, step := range []func(context.Context) error{
		v.pods, v.members, v.strays, v.hostPorts, v.store, v.pending,
	} {
		if ctx.Err() != nil {
			errs = append(errs, context.Cause(ctx))
			break
		}
		errs = append(errs, step(ctx))
	}
	return errors.Join(errs...)
}

// found are the findings so far, by object.
func (v *verification) found() []Finding {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.SortedStableFunc(slices.Values(v.findings), func(a, b Finding) int { return cmp.Compare(a.Object, b.Object) })
}

// report makes findings of problems, and repairs them if that is asked for.
func (v *verification) report(ctx context.Context, object string, problems []problem) {
	done := map[string]error{}
	for _, p := range problems {
		f := Finding{Object: object, Wrong: p.wrong, Remedy: p.remedy.text, Advice: p.advice}
		if v.repair && p.remedy.do != nil && ctx.Err() == nil { // what was seen when the time was up may be untrue
			err, tried := done[f.Remedy]
			if !tried {
				err = v.mend(ctx, object, p)
				done[f.Remedy] = err
			}
			f.Repaired = err == nil
			if err != nil {
				f.Err = err.Error()
			}
		}
		v.mu.Lock()
		v.findings = append(v.findings, f)
		v.mu.Unlock()
	}
}

func (v *verification) mend(ctx context.Context, object string, p problem) error {
	ctx, cancel := undoContext(ctx)
	defer cancel()
	err := v.deps.Trace.Do(ctx, "repair", object, p.remedy.do)
	if err != nil {
		slog.WarnContext(ctx, "repair failed", "object", object, "wrong", p.wrong, "err", err)
		return err
	}
	slog.WarnContext(ctx, "repaired", "object", object, "wrong", p.wrong, "remedy", p.remedy.text)
	return nil
}

// suspects are those of objects that look wrong, asked side by side.
func suspects[T any](objects []T, looksWrong func(T) bool) []T {
	var mu sync.Mutex
	var found []T
	var g errgroup.Group
	g.SetLimit(recoverWidth)
	for _, o := range objects {
		g.Go(func() error {
			if looksWrong(o) {
				mu.Lock()
				defer mu.Unlock()
				found = append(found, o)
			}
			return nil
		})
	}
	_ = g.Wait()
	return found
}

// each calls f for all objects side by side.
func each[T any](objects []T, f func(T)) {
	suspects(objects, func(o T) bool { f(o); return false })
}

// hostPorts compares the firewall's rules with the records.
func (v *verification) hostPorts(ctx context.Context) error {
	wrong, err := v.deps.Network.VerifyHostPorts(ctx)
	if err != nil {
		return fmt.Errorf("compare the rules of host ports: %w", err)
	}
	again := remedy{"the rules are made anew from the records", func(ctx context.Context) error { return v.deps.Network.Restore(ctx, nil) }}
	var problems []problem
	for _, text := range wrong {
		problems = append(problems, problem{wrong: text, remedy: again})
	}
	v.report(ctx, "host ports", problems)
	return nil
}

// store reports what members has found of the image store itself.
func (v *verification) store(ctx context.Context) error {
	for _, d := range v.loose {
		v.report(ctx, d.Object, []problem{{wrong: d.Text, remedy: remedy{d.Remedy, d.Mend}}})
	}
	return nil
}

// pending reports the cleanups that are retried.
func (v *verification) pending(ctx context.Context) error {
	for _, id := range v.cleanups.Keys() {
		again := remedy{"retry it now", func(ctx context.Context) error { return v.cleanups.Try(ctx, id) }}
		v.report(ctx, "cleanup of "+id, []problem{{wrong: "could not be finished, see the log", remedy: again}})
	}
	return nil
}

// unfinished is what a server that died in the middle of a verb has left.
func (e *Engine) unfinished(what string) problem {
	return problem{wrong: what + " was cut short", remedy: remedy{text: "what there is of it is removed"}}
}
