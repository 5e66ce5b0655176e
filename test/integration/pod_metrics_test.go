package integration

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// kubeletMetrics are those that Kubernetes 1.37 shows at /metrics/cadvisor for
// a container with limits, and that critest requires, except for those of block
// devices: a node may have none.
var kubeletMetrics = strings.Fields(`
	container_cpu_cfs_periods_total container_cpu_cfs_throttled_periods_total container_cpu_cfs_throttled_seconds_total
	container_cpu_system_seconds_total container_cpu_usage_seconds_total container_cpu_user_seconds_total
	container_file_descriptors container_processes container_sockets container_threads container_threads_max container_ulimits_soft
	container_fs_inodes_free container_fs_inodes_total container_fs_limit_bytes container_fs_usage_bytes
	container_last_seen container_start_time_seconds container_oom_events_total
	container_memory_cache container_memory_failcnt container_memory_failures_total container_memory_kernel_usage
	container_memory_mapped_file container_memory_max_usage_bytes container_memory_rss container_memory_swap
	container_memory_usage_bytes container_memory_working_set_bytes
	container_network_receive_bytes_total container_network_receive_errors_total
	container_network_receive_packets_dropped_total container_network_receive_packets_total
	container_network_transmit_bytes_total container_network_transmit_errors_total
	container_network_transmit_packets_dropped_total container_network_transmit_packets_total
	container_spec_cpu_period container_spec_cpu_quota container_spec_cpu_shares container_spec_memory_limit_bytes
	container_spec_memory_reservation_limit_bytes container_spec_memory_swap_limit_bytes`)

// deviceMetrics are those of block devices.
var deviceMetrics = strings.Fields(`container_blkio_device_usage_total container_fs_reads_bytes_total container_fs_reads_total
	container_fs_writes_bytes_total container_fs_writes_total`)

// podMetrics returns the metrics of the pod, or of a container in it, by name.
func (p *pod) podMetrics(t *testing.T, container string) map[string][]*cri.Metric {
	t.Helper()
	resp, err := p.w.Runtime().ListPodSandboxMetrics(t.Context(), &cri.ListPodSandboxMetricsRequest{})
	if err != nil {
		t.Fatalf("ListPodSandboxMetrics: %v", err)
	}
	byName := map[string][]*cri.Metric{}
	for _, m := range resp.PodMetrics {
		if m.PodSandboxId != p.id {
			continue
		}
		metrics := m.Metrics
		for _, c := range m.ContainerMetrics {
			if c.ContainerId == container {
				metrics = c.Metrics
			}
		}
		for _, m := range metrics {
			byName[m.Name] = append(byName[m.Name], m)
		}
	}
	return byName
}

func (w *world) metricDescriptors(t *testing.T) map[string]*cri.MetricDescriptor {
	t.Helper()
	resp, err := w.Runtime().ListMetricDescriptors(t.Context(), &cri.ListMetricDescriptorsRequest{})
	if err != nil {
		t.Fatalf("ListMetricDescriptors: %v", err)
	}
	byName := map[string]*cri.MetricDescriptor{}
	for _, d := range resp.Descriptors {
		byName[d.Name] = d
	}
	return byName
}

func limited(c *cri.ContainerConfig) {
	c.Linux.Resources = &cri.LinuxContainerResources{CpuPeriod: 100000, CpuQuota: 20000, CpuShares: 1024,
		MemoryLimitInBytes: 64 * mib, MemorySwapLimitInBytes: 64 * mib}
}

// Kubelets discard a metric that has not been described, or has other labels
// than described.
func TestPodMetricsAreCompleteAndDescribed(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	c := p.start(t, "sleep", limited)
	described, ofPod, ofContainer := w.metricDescriptors(t), p.podMetrics(t, ""), p.podMetrics(t, c.id)
	for _, metric := range kubeletMetrics {
		if described[metric] == nil || ofPod[metric] == nil && ofContainer[metric] == nil {
			t.Errorf("there is no %s", metric)
		}
	}
	for metric, d := range described {
		values := append(ofPod[metric], ofContainer[metric]...)
		if len(values) == 0 && !slices.Contains(deviceMetrics, metric) {
			t.Errorf("%s is described and has no value", metric)
		}
		for _, v := range values {
			equal(t, "labels of "+metric, len(v.LabelValues), len(d.LabelKeys))
		}
	}
	for metric := range ofContainer {
		if described[metric] == nil {
			t.Errorf("%s is not described", metric)
		}
	}
}

func TestPodMetricsAreTheKernels(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun", w.ownCgroup(t))
	parent := p.config.Linux.CgroupParent
	c := p.start(t, "alloc 10 ; sleep", limited)
	c.says(t, "allocated")
	ended := p.start(t, "exit 0")
	ended.wait(t)
	keys := w.metricDescriptors(t)
	metrics := p.podMetrics(t, c.id)
	one := func(name string) uint64 {
		t.Helper()
		if len(metrics[name]) == 0 {
			t.Errorf("there is no %s", name)
			return 0
		}
		return metrics[name][0].Value.GetValue()
	}
	for name, want := range map[string]uint64{
		"container_spec_cpu_period": 100000, "container_spec_cpu_quota": 20000,
		"container_spec_memory_limit_bytes": 64 * mib, "container_oom_events_total": 0,
	} {
		equal(t, name, one(name), want)
	}
	near(t, "memory", &cri.UInt64Value{Value: one("container_memory_usage_bytes")}, c.counter(t, memoryUsed), mib)
	near(t, "processes", &cri.UInt64Value{Value: one("container_processes")}, uint64(len(w.processesOf(t, c.id))), 1)
	near(t, "threads", &cri.UInt64Value{Value: one("container_threads")}, c.counter(t, tasks), 4)
	if peak, rss := one("container_memory_max_usage_bytes"), one("container_memory_rss"); peak < 10*mib || rss < 10*mib {
		t.Errorf("of 10 MiB at most %d were used, %d are resident", peak, rss)
	}
	labels := map[string]string{}
	for i, key := range keys["container_memory_rss"].LabelKeys {
		labels[key] = metrics["container_memory_rss"][0].LabelValues[i]
	}
	m := p.config.Metadata
	for key, want := range map[string]string{
		"container": c.config.Metadata.Name, "pod": m.Name, "namespace": m.Namespace,
		"id":   filepath.Join(parent, "crius-"+c.id),
		"name": "k8s_" + c.config.Metadata.Name + "_" + m.Name + "_" + m.Namespace + "_" + m.Uid + "_" + strconv.Itoa(int(c.config.Metadata.Attempt)),
	} {
		equal(t, "label "+key, labels[key], want)
	}
	if len(p.podMetrics(t, ended.id)["container_processes"]) != 0 {
		t.Error("a container that has exited has processes")
	}
	metrics = p.podMetrics(t, "")
	if one("container_memory_usage_bytes") < 10*mib || one("container_network_receive_bytes_total") == 0 && one("container_network_transmit_bytes_total") == 0 {
		t.Error("the pod uses neither memory nor network")
	}
	equal(t, "cgroup of the pod", metrics["container_last_seen"][0].LabelValues[1], parent)
}
