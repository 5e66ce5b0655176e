// Package metrics serves Prometheus metrics about the server's work and the
// node's contents. docs/metrics.md has the names of all metrics, beside CRI-O's
// for the same things.
package metrics

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc/status"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/server/stream"
	"github.com/crius-run/crius/storage/pull/progress"
)

// Metrics counts what it observes as a trace.Observer, and collects the rest from
// Sources when it is scraped.
type Metrics struct {
	registry *prometheus.Registry

	calls      *prometheus.HistogramVec
	failures   *prometheus.CounterVec
	operations *prometheus.HistogramVec
	steps      *prometheus.HistogramVec
	pulls      *prometheus.CounterVec
	dumps      *prometheus.CounterVec
	restores   *prometheus.CounterVec
}

// Sources are called at every scrape.
type Sources struct {
	Node   func() pod.Summary
	Logged func(context.Context) conmon.LogCount
	// Sizes returns the bytes of images and of writable layers
	// (storage.Store.Sizes).
	Sizes func() (images, writable uint64, err error)
	// Status returns the last known status of the runtime and the network; nil:
	// none yet.
	Status func() (*view.RuntimeStatus, *view.NetworkStatus)
	Pulls  *progress.Counts
	// Sessions counts what the stream server refused.
	Sessions func() stream.Counts
	Version  string
	// Vulnerable returns the CVEs of the handlers' runtimes.
	Vulnerable func() map[string][]string
}

// durations range from work without I/O to work that hangs.
var durations = prometheus.ExponentialBuckets(0.001, 2, 18)

// New returns the metrics that are counted. Register adds those that are
// collected, once there is a node.
func New() *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crius_rpc_duration_seconds", Help: "Duration of CRI calls, by method.", Buckets: durations,
		}, []string{"method"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crius_rpc_errors_total", Help: "CRI calls that failed, by method and gRPC code.",
		}, []string{"method", "code"}),
		operations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crius_operation_duration_seconds", Buckets: durations,
			Help: "Duration of operations on pods, containers and images, whether or not a caller waited, by operation and outcome (ok, error).",
		}, []string{"operation", "outcome"}),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crius_step_duration_seconds", Help: "Duration of the steps of operations, by step.", Buckets: durations,
		}, []string{"step"}),
		pulls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crius_image_pull_failures_total", Help: "Image pulls that failed, by reason.",
		}, []string{"reason"}),
		dumps: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crius_checkpoint_failures_total", Help: "Checkpoints of containers and pods that failed, by reason.",
		}, []string{"reason"}),
		restores: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crius_restore_failures_total", Help: "Restores of pods from checkpoints that failed, by reason.",
		}, []string{"reason"}),
	}
	other := reason{name: otherReason}
	for _, reason := range append(pullReasons, other) { // 0 is a value for comparisons
		m.pulls.WithLabelValues(reason.name)
	}
	for _, reason := range append(checkpointReasons, other) {
		m.dumps.WithLabelValues(reason.name)
	}
	for _, reason := range slices.Concat(restoreReasons, []reason{other}) {
		m.restores.WithLabelValues(reason.name)
	}
	m.registry.MustRegister(m.calls, m.failures, m.operations, m.steps, m.pulls, m.dumps, m.restores,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Begin is called for each call, operation and step (trace.Observer).
func (m *Metrics) Begin(ctx context.Context, kind trace.Kind, name, _ string) (context.Context, func(error)) {
	began := time.Now()
	return ctx, func(err error) {
		took := time.Since(began).Seconds()
		switch kind {
		case trace.RPC:
			m.calls.WithLabelValues(name).Observe(took)
			if err != nil {
				m.failures.WithLabelValues(name, status.Code(err).String()).Inc()
			}
		case trace.Operation:
			outcome := "ok"
			if err != nil {
				outcome = "error"
			}
			m.operations.WithLabelValues(name, outcome).Observe(took)
			if err != nil {
				m.failed(name, err)
			}
		case trace.Step:
			m.steps.WithLabelValues(name).Observe(took)
		}
	}
}

// failed counts the reasons of failed operations.
func (m *Metrics) failed(operation string, err error) {
	switch {
	case operation == pullOperation:
		m.pulls.WithLabelValues(reasonOf(err, pullReasons)).Inc()
	case operation == restoreOperation:
		m.restores.WithLabelValues(reasonOf(err, restoreReasons)).Inc()
	case isCheckpoint(operation):
		m.dumps.WithLabelValues(reasonOf(err, checkpointReasons)).Inc()
	}
}

// Register adds what is collected from sources, even if ctx has ended.
func (m *Metrics) Register(ctx context.Context, s Sources) {
	ctx = context.WithoutCancel(ctx)
	m.registry.MustRegister(
		&nodeCollector{s.Node}, vulnerable(s.Vulnerable), readiness(s.Status), sizes(s.Sizes), pullTimes{&s.Pulls.Took}, sessions(s.Sessions),
		logs(func() conmon.LogCount { return s.Logged(ctx) }),
		counter("crius_panics_total", "Recovered panics: defects of crius, with stack traces in its log.", func() float64 { return float64(panics.Count()) }),
		counter("crius_image_pull_bytes_total", "Bytes of image layers and configurations downloaded from registries.", func() float64 { return float64(s.Pulls.Bytes.Load()) }),
		counter("crius_image_pull_resumed_bytes_total", "Bytes of image layers not downloaded again because an earlier or another pull had downloaded them.", func() float64 { return float64(s.Pulls.Resumed.Load()) }),
		counter("crius_image_blobs_fetched_total", "Image blobs downloaded.", func() float64 { return float64(s.Pulls.Fetched.Load()) }),
		counter("crius_image_blobs_present_total", "Image blobs not downloaded because they were present.", func() float64 { return float64(s.Pulls.Present.Load()) }),
		counter("crius_registry_warnings_total", "Warnings for users that registries sent with their answers to image pulls.", func() float64 { return float64(s.Pulls.Warned.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "crius_build_info", Help: "Version of crius as a label; the value is always 1.", ConstLabels: prometheus.Labels{"version": s.Version},
		}, func() float64 { return 1 }),
	)
}

func counter(name, help string, value func() float64) prometheus.CounterFunc {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, value)
}

// Handler answers scrapes.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second})
}
