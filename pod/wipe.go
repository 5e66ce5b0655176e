package pod

import (
	"context"
	"errors"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/audit"
)

// Wipe removes all pods and containers, running or not, and everything else with an id of this
// server. It returns what remains: objects that could not be removed stay on record and are
// retried, by this server or the next. When ctx ends, no further removal begins; those in
// progress are not interrupted.
func (e *Engine) Wipe(ctx context.Context) ([]audit.Finding, error) {
	all := e.sandboxes.All()
	errs := make([]error, len(all))
	var removals errgroup.Group
	removals.SetLimit(recoverWidth)
	for i, s := range all {
		removals.Go(func() error {
			if errs[i] = context.Cause(ctx); errs[i] == nil {
				ctx, cancel := context.WithTimeout(ctx, undoTime)
				defer cancel()
				errs[i] = e.RemoveSandbox(ctx, s.ID)
			}
			return nil
		})
	}
	_ = removals.Wait()
	found, err := e.audit.Verify(ctx, true)
	var left []audit.Finding
	for _, f := range found {
		if !f.Repaired {
			left = append(left, f)
		}
	}
	pods, _, _, readErr := e.records.Pods.Read()
	for id, rec := range pods {
		if _, err := e.runtimeOf(rec.Handler, rec.Origin); err != nil {
			left = append(left, audit.Finding{Object: "pod " + id, Wrong: fault.Text(err), Advice: "add the handler to runtime.handlers again; without it crius cannot stop the pod"})
		}
	}
	return left, errors.Join(append(errs, err, readErr)...)
}
