package pod

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/pod/audit"
)

// Wipe removes all pods and containers, running or not, and whatever else bears
// our mark. It returns what remains: what could not be given back stays on
// record and is tried again, by this server or the next. When ctx ends no further
// removal begins; those under way are not cut short.
func (e *Engine) Wipe(ctx context.Context) ([]audit.Finding, error) {
	var mu sync.Mutex
	var errs []error
	var removals errgroup.Group
	removals.SetLimit(recoverWidth)
	for _, s := range e.sandboxes.All() {
		removals.Go(func() error {
			err := context.Cause(ctx)
			if err == nil {
				ctx, cancel := context.WithTimeout(ctx, undoTime)
				defer cancel()
				err = e.RemoveSandbox(ctx, s.id)
			}
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
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
		if _, err := e.deps.Runtimes.Get(rec.Handler); err != nil {
			left = append(left, audit.Finding{Object: "pod " + id, Wrong: err.Error(), Advice: "add the handler to runtime.handlers again; without it crius cannot stop the pod"})
		}
	}
	return left, errors.Join(append(errs, err, readErr)...)
}
