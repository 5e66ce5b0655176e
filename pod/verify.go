package pod

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/storage"
)

// This file and its neighbours compare the records with the node. They first check
// everything without locks. A difference counts only if it is still there when the
// object's life lock is held, since no verb works on the object then. Repairs are
// existing operations such as stop and teardown; none are specific to this check.

// answerTime is how long a monitor may take to answer.
const answerTime = 5 * time.Second

// verification is one comparison.
type verification struct {
	engine *Engine
	report *audit.Report
	loose  []storage.Defect // of the image store itself
}

// Verify compares the node with its records and says what is wrong; with repair
// it also does something about it. It may be called at any time beside the
// verbs. The error says what could not be looked at; the findings are true all
// the same. One check is at work at a time, and none for longer than ctx: what
// hangs then is left behind, and repairs nothing any more.
func (e *Engine) Verify(ctx context.Context, repair bool) ([]audit.Finding, error) {
	select {
	case e.verifying <- struct{}{}:
		defer func() { <-e.verifying }()
	case <-ctx.Done():
		return nil, fmt.Errorf("another check is running: %w", context.Cause(ctx))
	}
	v := &verification{engine: e, report: audit.NewReport(nil)}
	if repair {
		v.report = audit.NewReport(e.repair)
	}
	done := make(chan error, 1)
	e.background.Go("check", func() {
		done <- panics.Do(ctx, "check", func() error { return v.look(ctx) })
	})
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return v.report.Findings(), err
}

// look compares everything.
func (v *verification) look(ctx context.Context) error {
	var errs []error
	for _, step := range []func(context.Context) error{
		v.pods, v.members, v.unknown, v.hostPorts, v.store, v.pending,
	} {
		if ctx.Err() != nil {
			errs = append(errs, context.Cause(ctx))
			break
		}
		errs = append(errs, step(ctx))
	}
	return errors.Join(errs...)
}

// repair does a remedy in the name of an object.
func (e *Engine) repair(ctx context.Context, object string, do func(context.Context) error) error {
	ctx, cancel := undoContext(ctx)
	defer cancel()
	return e.deps.Trace.Do(ctx, "repair", object, do)
}

// unknown reports what has no record.
func (v *verification) unknown(ctx context.Context) error { return v.engine.orphans(ctx, v.report) }

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
	wrong, err := v.engine.deps.Network.VerifyHostPorts(ctx)
	if err != nil {
		return fmt.Errorf("compare the rules of host ports: %w", err)
	}
	again := audit.Remedy{Text: "rebuild the rules from the records", Do: func(ctx context.Context) error { return v.engine.deps.Network.Restore(ctx, nil) }}
	var problems []audit.Problem
	for _, text := range wrong {
		problems = append(problems, audit.Problem{Wrong: text, Remedy: again})
	}
	v.report.Add(ctx, "host ports", problems)
	return nil
}

// store reports what members has found of the image store itself.
func (v *verification) store(ctx context.Context) error {
	for _, d := range v.loose {
		v.report.Add(ctx, d.Object, []audit.Problem{{Wrong: d.Text, Remedy: audit.Remedy{Text: d.Remedy, Do: d.Mend}}})
	}
	return nil
}

// pending reports the cleanups that are retried.
func (v *verification) pending(ctx context.Context) error {
	for _, id := range v.engine.cleanups.Keys() {
		again := audit.Remedy{Text: "retry it now", Do: func(ctx context.Context) error { return v.engine.cleanups.Try(ctx, id) }}
		v.report.Add(ctx, "cleanup of "+id, []audit.Problem{{Wrong: "could not be finished, see the log", Remedy: again}})
	}
	return nil
}

// unfinished is what a server that died in the middle of a verb has left.
func (e *Engine) unfinished(what string) audit.Problem {
	return audit.Problem{Wrong: what + " was interrupted", Remedy: audit.Remedy{Text: "remove what is left of it"}}
}
