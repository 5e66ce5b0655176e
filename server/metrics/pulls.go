package metrics

import (
	"context"
	"errors"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage"
)

// pullOperation is the operation whose failures are counted by reason.
const pullOperation = "pull image"

// reason is a reason for failures, and the error by which it is recognized
// (storage.Store.Pull, pod.Engine.CheckpointContainer).
type reason struct {
	name string
	kind error
}

// pullReasons are in order of precedence: an error may match several.
var pullReasons = []reason{
	{"cancelled", context.Canceled},
	{"signature", storage.ErrSignature},
	{"not found", fault.NotFound},
	{"unauthenticated", fault.Unauthenticated},
	{"denied", fault.Denied},
	{"timeout", fault.Timeout},
	{"disk full", fault.Exhausted},
	{"unavailable", fault.Unavailable},
	{"invalid", fault.Invalid},
	{"configuration", fault.Precondition},
}

const otherReason = "other"

func reasonOf(err error, reasons []reason) string {
	for _, reason := range reasons {
		if errors.Is(err, reason.kind) {
			return reason.name
		}
	}
	return otherReason
}
