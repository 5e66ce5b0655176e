package pod

import (
	"context"
	"errors"
	"fmt"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
)

// overtaken returns the error of a verb that needs a running container. If the container has
// exited meanwhile, the verb may have failed because something disappeared with it, such as a
// cgroup, a directory or a shim; the error is fault.Precondition then.
func overtaken(ctx context.Context, by oci.Task, err error) error {
	if ctx.Err() != nil || errors.Is(err, fault.Precondition) || errors.Is(err, fault.Timeout) || !oci.Exited(by) {
		return err
	}
	return fmt.Errorf("container has exited meanwhile: %s: %w", fault.Text(err), fault.Precondition)
}

// causedBy puts the cause of the end of ctx before the error of the work that ended with it,
// since libraries only report that they were cancelled. The text of err is kept for people, but
// not err itself: callers would take it for a failure of the step.
func causedBy(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w (%s)", cause, fault.Text(err))
	}
	return err
}

// doneIfAbsent turns NotFound into success, for verbs whose goal is that the object is gone.
func doneIfAbsent(err error) error {
	if errors.Is(err, fault.NotFound) {
		return nil
	}
	return err
}

var errClosing = fmt.Errorf("crius is shutting down: %w", fault.Unavailable)
