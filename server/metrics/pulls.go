package metrics

import (
	"context"
	"errors"
	"maps"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/pull/progress"
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
	{"disk full", unix.ENOSPC},
	{"disk full", unix.EDQUOT},
	{"limit", fault.Exhausted},
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

var pullDuration = describe("crius_image_pull_duration_seconds", "Duration of pulls that brought an image, by the size of its layers in the registry.", "size")

// pullTimes collects the durations of pulls.
type pullTimes struct{ took *progress.Durations }

func (pullTimes) Describe(out chan<- *prometheus.Desc) { out <- pullDuration }

func (p pullTimes) Collect(out chan<- prometheus.Metric) {
	p.took.BySize(func(class string, h progress.Histogram) {
		out <- prometheus.MustNewConstHistogram(pullDuration, h.Count, h.Sum.Seconds(), maps.Clone(h.Within), class)
	})
}
