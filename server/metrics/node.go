package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod"
)

// nodeCollector makes metrics of a summary of the node.
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
)

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// Describe is the prometheus.Collector's.
func (c *nodeCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{pods, containers, monitors, cleanups, active, longest, oomKilled, monitorsLost, leftovers} {
		out <- d
	}
}

// Collect is the prometheus.Collector's.
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
}

// lastWord is the state in CONTAINER_RUNNING.
func lastWord(name string) string {
	return strings.ToLower(name[strings.LastIndex(name, "_")+1:])
}

// vulnerable makes a metric of each vulnerability of a handler's runtime.
type vulnerable func() map[string][]string

var vulnerability = describe("crius_runtime_vulnerability", "Known vulnerabilities of the runtime of a handler, judged by its version; the value is always 1.", "handler", "cve")

// Describe is the prometheus.Collector's.
func (vulnerable) Describe(out chan<- *prometheus.Desc) { out <- vulnerability }

// Collect is the prometheus.Collector's.
func (v vulnerable) Collect(out chan<- prometheus.Metric) {
	for handler, cves := range v() {
		for _, cve := range cves {
			out <- prometheus.MustNewConstMetric(vulnerability, prometheus.GaugeValue, 1, handler, cve)
		}
	}
}
