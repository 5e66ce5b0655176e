package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/view"
)

// nodeCollector makes metrics from a summary of the node.
type nodeCollector struct{ summary func() pod.Summary }

var (
	pods       = describe("crius_pods", "Pods by state (ready, notready).", "state")
	containers = describe("crius_containers", "Containers by state (created, running, exited).", "state")
	monitors   = describe("crius_monitors", "Monitors (crius-conmon) of containers and pods.")
	cleanups   = describe("crius_pending_cleanups", "Objects whose cleanup could not be finished and is retried.")
	active     = describe("crius_operations_active", "Operations in progress.", "operation")
	longest    = describe("crius_operation_longest_seconds", "Time since the start of the oldest operation in progress; 0 if there is none.")

	oomKilled    = describe("crius_containers_oom_total", "Containers that ended because they ran out of memory.")
	monitorsLost = describe("crius_monitors_lost_total", "Monitors that died before their containers.")
	leftovers    = describe("crius_orphans_total", "Orphans (objects without a record) found when the server started.")
	dropped      = describe("crius_events_dropped_total", "Events of pods and containers that a client did not get because it was too slow.")
)

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// Describe implements prometheus.Collector.
func (c *nodeCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{pods, containers, monitors, cleanups, active, longest, oomKilled, monitorsLost, leftovers, dropped, checkpointBytes, restoredBytes, frozen} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *nodeCollector) Collect(out chan<- prometheus.Metric) {
	s := c.summary()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	count := func(d *prometheus.Desc, value uint64) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value))
	}
	for _, state := range []cri.PodSandboxState{cri.PodSandboxState_SANDBOX_READY, cri.PodSandboxState_SANDBOX_NOTREADY} {
		gauge(pods, float64(s.Pods[state]), lastWord(state.String()))
	}
	for _, state := range []cri.ContainerState{cri.ContainerState_CONTAINER_CREATED, cri.ContainerState_CONTAINER_RUNNING, cri.ContainerState_CONTAINER_EXITED} {
		gauge(containers, float64(s.Containers[state]), lastWord(state.String()))
	}
	gauge(monitors, float64(s.Monitors))
	gauge(cleanups, float64(s.Cleanups))
	underWay := map[string]int{}
	first := 0.0
	for _, w := range s.Work {
		underWay[w.Operation]++
		first = max(first, w.Took.Seconds())
	}
	for operation, n := range underWay {
		gauge(active, float64(n), operation)
	}
	gauge(longest, first)
	count(oomKilled, s.OOMKilled)
	count(monitorsLost, s.MonitorsLost)
	count(leftovers, s.Leftovers)
	count(dropped, s.EventsDropped)
	collectCheckpoints(out, s.Checkpointed, s.Restored)
}

// lastWord returns the state in CONTAINER_RUNNING.
func lastWord(name string) string {
	return strings.ToLower(name[strings.LastIndex(name, "_")+1:])
}

// vulnerable makes a metric of each vulnerability of a handler's runtime.
type vulnerable func() map[string][]string

var vulnerability = describe("crius_runtime_vulnerability", "Known vulnerabilities of the runtime of a handler, judged by its version; the value is always 1.", "handler", "cve")

// Describe implements prometheus.Collector.
func (vulnerable) Describe(out chan<- *prometheus.Desc) { out <- vulnerability }

// Collect implements prometheus.Collector.
func (v vulnerable) Collect(out chan<- prometheus.Metric) {
	for handler, cves := range v() {
		for _, cve := range cves {
			out <- prometheus.MustNewConstMetric(vulnerability, prometheus.GaugeValue, 1, handler, cve)
		}
	}
}

// readiness collects the last known conditions of the node.
type readiness func() (*view.RuntimeStatus, *view.NetworkStatus)

var ready = describe("crius_ready", "Whether a condition of the node (RuntimeReady, NetworkReady) is true; absent until it is known.", "condition")

// Describe implements prometheus.Collector.
func (readiness) Describe(out chan<- *prometheus.Desc) { out <- ready }

// Collect implements prometheus.Collector.
func (r readiness) Collect(out chan<- prometheus.Metric) {
	gauge := func(condition string, notReady error) {
		value := 1.0
		if notReady != nil {
			value = 0
		}
		out <- prometheus.MustNewConstMetric(ready, prometheus.GaugeValue, value, condition)
	}
	runtime, network := r()
	if runtime != nil {
		gauge(cri.RuntimeReady, runtime.NotReady)
	}
	if network != nil {
		gauge(cri.NetworkReady, network.NotReady)
	}
}

// sizes collects the known usage of the disks, without measuring it.
type sizes func() (images, writable uint64, err error)

var (
	imageBytes    = describe("crius_image_bytes", "Bytes of the disk that images and OCI artifacts take, with their records and kept downloads; each layer counts once.")
	writableBytes = describe("crius_writable_layer_bytes", "Bytes of the writable layers of all containers, as they were measured last for the kubelet.")
)

// Describe implements prometheus.Collector.
func (sizes) Describe(out chan<- *prometheus.Desc) {
	out <- imageBytes
	out <- writableBytes
}

// Collect implements prometheus.Collector. Without an answer of the store there
// is no value.
func (s sizes) Collect(out chan<- prometheus.Metric) {
	images, writable, err := s()
	if err == nil {
		out <- prometheus.MustNewConstMetric(imageBytes, prometheus.GaugeValue, float64(images))
	}
	out <- prometheus.MustNewConstMetric(writableBytes, prometheus.GaugeValue, float64(writable))
}

// logs collects what containers have written; it asks each of their monitors
// once.
type logs func() conmon.LogCount

var (
	logBytes     = describe("crius_container_log_bytes_total", "Bytes written to container logs.")
	logDiscarded = describe("crius_container_log_discarded_bytes_total", "Bytes that were not written to container logs since they exceeded runtime.container_log_rate or container_log_max_size.")
	journalLost  = describe("crius_container_journal_lost_bytes_total", "Bytes of output that journald (runtime.container_log_journal) did not accept in time.")
)

// Describe implements prometheus.Collector.
func (logs) Describe(out chan<- *prometheus.Desc) {
	out <- logBytes
	out <- logDiscarded
	out <- journalLost
}

// Collect implements prometheus.Collector.
func (l logs) Collect(out chan<- prometheus.Metric) {
	n := l()
	out <- prometheus.MustNewConstMetric(logBytes, prometheus.CounterValue, float64(n.Written))
	out <- prometheus.MustNewConstMetric(logDiscarded, prometheus.CounterValue, float64(n.Discarded))
	out <- prometheus.MustNewConstMetric(journalLost, prometheus.CounterValue, float64(n.JournalLost))
}
