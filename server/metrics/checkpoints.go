package metrics

import (
	"context"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod"
)

// isCheckpoint reports whether the failures of an operation are counted as those of checkpoints.
func isCheckpoint(operation string) bool {
	return operation == "checkpoint" || operation == "checkpoint pod"
}

// restoreOperation is the operation whose failures are counted as those of restores.
const restoreOperation = "restore pod"

// restoreReasons are in order of precedence, as pullReasons: first what a checkpoint signs for is not so.
var restoreReasons = slices.Concat([]reason{{"denied", fault.Denied}}, checkpointReasons)

// checkpointReasons are in order of precedence, as pullReasons.
var checkpointReasons = []reason{
	{"unsupported", fault.Unimplemented},
	{"disk full", unix.ENOSPC},
	{"disk full", unix.EDQUOT},
	{"limit", fault.Exhausted},
	{"timeout", fault.Timeout},
	{"timeout", context.DeadlineExceeded},
	{"exists", fault.Exists},
	{"precondition", fault.Precondition},
	{"unavailable", fault.Unavailable},
	{"not found", fault.NotFound},
	{"invalid", fault.Invalid},
	{"cancelled", context.Canceled},
}

var (
	checkpointBytes = describe("crius_checkpoint_bytes_total", "Bytes of containers in complete checkpoints.")
	restoredBytes   = describe("crius_restore_bytes_total", "Bytes of checkpoints from which pods were restored.")
	frozen          = describe("crius_checkpoint_frozen_seconds", "Time for which containers were frozen by checkpoints, complete or not.")
)

func collectCheckpoints(out chan<- prometheus.Metric, c pod.CheckpointCounts, restored uint64) {
	out <- prometheus.MustNewConstMetric(restoredBytes, prometheus.CounterValue, float64(restored))
	out <- prometheus.MustNewConstMetric(checkpointBytes, prometheus.CounterValue, float64(c.Bytes))
	out <- prometheus.MustNewConstHistogram(frozen, c.Times, c.Sum.Seconds(), c.Within)
}
