package pod

import (
	"context"
	"errors"
	"fmt"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
)

// overtaken is the error of a verb that needs a container which is alive. If it has exited
// meanwhile the verb may have met anything that goes with it: a cgroup or a directory that is
// not there any more, or a shim.
func overtaken(ctx context.Context, by oci.Task, err error) error {
	if ctx.Err() != nil || errors.Is(err, fault.Precondition) || errors.Is(err, fault.Timeout) || !oci.Exited(by) {
		return err
	}
	return fmt.Errorf("container has exited meanwhile: %s: %w", err.Error(), fault.Precondition)
}

// causedBy puts the reason for which ctx has ended before an error of work that ended
// with it: libraries report no more than that it was cancelled. That error is for people
// alone: callers would take it for a failure of the step that met the end.
func causedBy(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w (%s)", cause, err.Error())
	}
	return err
}

// doneIfAbsent makes the error of an unknown id that of a verb which wants the object
// gone.
func doneIfAbsent(err error) error {
	if errors.Is(err, fault.NotFound) {
		return nil
	}
	return err
}

var errClosing = fmt.Errorf("crius is shutting down: %w", fault.Unavailable)
