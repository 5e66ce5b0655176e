package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/crius-run/crius/server/stream"
)

// sessions collects what the stream server refused.
type sessions func() stream.Counts

var (
	sessionsRefused = describe("crius_sessions_refused_total", "Exec, attach and port-forward sessions, and connections forwarded by them, refused because there were too many, by the limit that was reached (container, node, pending, forward).", "reason")
	strangersClosed = describe("crius_stream_connections_closed_total", "Connections to api.stream_address closed before they showed a session URL, because their peer had more of them than any other and there were too many.")
)

// Describe implements prometheus.Collector.
func (sessions) Describe(out chan<- *prometheus.Desc) {
	out <- sessionsRefused
	out <- strangersClosed
}

// Collect implements prometheus.Collector.
func (s sessions) Collect(out chan<- prometheus.Metric) {
	n := s()
	for reason, refused := range n.Refused {
		out <- prometheus.MustNewConstMetric(sessionsRefused, prometheus.CounterValue, float64(refused), reason)
	}
	out <- prometheus.MustNewConstMetric(strangersClosed, prometheus.CounterValue, float64(n.Closed))
}
