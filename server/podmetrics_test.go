package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// everything is the offers of a kernel with all features.
var everything = cgroup.Offers{Pressure: true, HugePages: true, HugePageMax: true, CPUBurst: true}

// fillDetails gives every field in v a different value, in billions.
func fillDetails(v reflect.Value, n *uint64) {
	switch v.Kind() {
	case reflect.Uint64:
		*n++
		v.SetUint(*n * 1e9)
	case reflect.String:
		v.SetString("2MB")
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fillDetails(v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillDetails(v.Index(0), n)
	case reflect.Struct:
		for i := range v.NumField() {
			fillDetails(v.Field(i), n)
		}
	}
}

// somePodMetrics has a different value in every field.
func somePodMetrics() *usage.PodMetrics {
	p := &usage.PodMetrics{Cgroup: "/kubepods/pod1"}
	c := &usage.ContainerMetrics{Cgroup: "/kubepods/pod1/crius-2"}
	n := uint64(100)
	for _, v := range []any{&p.Details, &p.Interfaces, &p.Sockets, &c.Details, &c.Processes} {
		fillDetails(reflect.ValueOf(v).Elem(), &n)
	}
	for _, d := range []*cgroup.Details{&p.Details, &c.Details} {
		d.IO = []cgroup.DeviceIO{{Major: 8, Operations: []cgroup.Operation{
			{Name: "Read", Bytes: new(uint64(11)), Count: new(uint64(12))}, {Name: "Write", Bytes: new(uint64(13)), Count: new(uint64(14))},
		}}}
	}
	p.Interfaces[0].Name = "eth0"
	c.Layer = &storage.FsUsage{UsedBytes: 15, Timestamp: time.Unix(0, 23)}
	c.Disk = &storage.FsSize{Device: "/dev/sdb", Bytes: 16, Inodes: 17, FreeInodes: 18}
	p.View = &view.Sandbox{ID: idOf(1), CreatedAt: time.Unix(19, 0),
		Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u-1", Attempt: 3}}}
	c.View = &view.Container{ID: idOf(2), CreatedAt: time.Unix(20, 0), StartedAt: time.Unix(21, 0), ImageRef: "registry.test/nginx@sha256:1",
		Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "nginx", Attempt: 4}}}
	p.Containers = []*usage.ContainerMetrics{c}
	return p
}

// podMetricsOf returns the metrics of p of these kinds, of the pod and its
// first container.
func podMetricsOf(t *testing.T, p *usage.PodMetrics, kinds ...string) (ofPod, ofContainer []*cri.Metric, descriptors []*cri.MetricDescriptor) {
	t.Helper()
	a, err := newMetricsAPI(&fakeEngine{offers: everything}, kinds)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := a.ListMetricDescriptors(t.Context(), &cri.ListMetricDescriptorsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	names := deviceNames{{8, 0}: "/dev/sda"}
	return a.collect(podSample(p, time.Unix(22, 0)), names), a.collect(containerSample(p, p.Containers[0], time.Unix(22, 0)), names), resp.Descriptors
}

// The other side of the comparison is in test/cadvisor. Not parallel: between
// fork and exec a child keeps, for a moment, locks and listeners that other
// tests release.
func TestPodMetricsAreThoseOfCAdvisor(t *testing.T) {
	type metric struct {
		Help, Type     string
		Labels, Values []string
	}
	crius := map[string]map[string]*metric{}
	for _, kind := range PodMetricKinds() {
		ofPod, ofContainer, descriptors := podMetricsOf(t, somePodMetrics(), kind)
		all := map[string]*metric{}
		for _, d := range descriptors {
			all[d.Name] = &metric{Help: d.Help, Labels: d.LabelKeys}
		}
		for _, m := range append(ofPod, ofContainer...) {
			of := all[m.Name]
			of.Type = m.MetricType.String()
			var own []string
			for i := len(baseLabels); i < len(of.Labels); i++ {
				own = append(own, of.Labels[i]+"="+m.LabelValues[i])
			}
			slices.Sort(own)
			if value := strings.Join(own, ","); !slices.Contains(of.Values, value) {
				of.Values = append(of.Values, value)
			}
		}
		crius[kind] = all
	}
	text, err := json.Marshal(crius)
	if err != nil {
		t.Fatal(err)
	}
	compare := exec.CommandContext(t.Context(), "go", "run", "-C", "../test/cadvisor", ".", "metrics")
	compare.Env = append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=0")
	compare.Stdin = bytes.NewReader(text)
	if said, err := compare.CombinedOutput(); err != nil {
		t.Errorf("%v:\n%s", err, said)
	}
}

func TestEveryPodMetricIsDescribed(t *testing.T) {
	t.Parallel()
	ofPod, ofContainer, descriptors := podMetricsOf(t, somePodMetrics(), AllPodMetrics)
	labels, valued, series := map[string]int{}, map[string]bool{}, map[string]bool{}
	for _, d := range descriptors {
		if labels[d.Name] != 0 {
			t.Errorf("%s is described twice", d.Name)
		}
		labels[d.Name] = len(d.LabelKeys)
	}
	for _, m := range append(ofPod, ofContainer...) {
		valued[m.Name] = true
		if len(m.LabelValues) != labels[m.Name] {
			t.Errorf("%s has %d labels, described are %d", m.Name, len(m.LabelValues), labels[m.Name])
		}
		one := fmt.Sprint(m.Name, m.LabelValues)
		if series[one] {
			t.Errorf("%s is there twice", one)
		}
		series[one] = true
		want := int64(0) // it was read for this call (api.proto)
		if m.Name == "container_fs_usage_bytes" {
			want = 23
		}
		if m.Timestamp != want {
			t.Errorf("%s is of %d, want %d", m.Name, m.Timestamp, want)
		}
	}
	for name := range labels {
		if !valued[name] {
			t.Errorf("%s has no value", name)
		}
	}
}

// 1024 shares are the weight 39 or 100, depending on the runtime.
func TestSharesOfAWeightAreThoseAskedFor_cadvisor_3737(t *testing.T) {
	t.Parallel()
	estimate := uint64(2597)
	for name, c := range map[string]struct {
		shares   int64
		unified  map[string]string
		ofWeight bool
		want     uint64
	}{
		"v2":             {1024, nil, true, 1024},
		"v2, unasked":    {0, nil, true, estimate},
		"v2, own weight": {1024, map[string]string{"cpu.weight": "100"}, true, estimate},
		"v1":             {1024, nil, false, estimate}, // whatever the kernel says
	} {
		view := &view.Container{Resources: &cri.ContainerResources{Linux: &cri.LinuxContainerResources{CpuShares: c.shares, Unified: c.unified}}}
		s := &sample{details: &cgroup.Details{Limits: cgroup.Limits{CPUShares: &estimate, SharesOfWeight: c.ofWeight}}, container: &usage.ContainerMetrics{View: view}}
		if got := cpuShares(s); *got != c.want {
			t.Errorf("%s: %d, want %d", name, *got, c.want)
		}
	}
	if got := cpuShares(&sample{details: &cgroup.Details{Limits: cgroup.Limits{CPUShares: &estimate, SharesOfWeight: true}}}); *got != estimate {
		t.Errorf("of a pod: %d", *got)
	}
}

func TestPodMetricValues(t *testing.T) {
	t.Parallel()
	p := somePodMetrics()
	c := p.Containers[0]
	ofPod, ofContainer, _ := podMetricsOf(t, p, AllPodMetrics)
	check := func(metrics []*cri.Metric, base string, want map[string]uint64) {
		t.Helper()
		got := map[string]uint64{}
		for _, m := range metrics {
			if labels := strings.Join(m.LabelValues[:len(baseLabels)], " "); labels != base {
				t.Errorf("%s has labels %q, want %q", m.Name, labels, base)
			}
			got[strings.Join(append([]string{m.Name}, m.LabelValues[len(baseLabels):]...), " ")] = m.Value.Value
		}
		for series, n := range want {
			if got[series] != n {
				t.Errorf("%s is %d, want %d", series, got[series], n)
			}
		}
	}
	check(ofPod, " /kubepods/pod1  k8s_POD_web_default_u-1_3 default web", map[string]uint64{
		"container_start_time_seconds":                          19,
		"container_last_seen":                                   22,
		"container_cpu_usage_seconds_total total":               *p.Details.CPU.Total / 1e9,
		"container_network_receive_bytes_total eth0":            p.Interfaces[0].RxBytes,
		"container_network_receive_packets_dropped_total eth0":  p.Interfaces[0].RxDropped,
		"container_network_transmit_errors_total eth0":          p.Interfaces[0].TxErrors,
		"container_network_transmit_packets_total eth0":         p.Interfaces[0].TxPackets,
		"container_network_transmit_bytes_total eth0":           p.Interfaces[0].TxBytes,
		"container_network_udp6_usage_total dropped":            p.Sockets.UDP6.Dropped,
		"container_network_tcp_usage_total listen":              p.Sockets.TCP[10],
		"container_memory_working_set_bytes":                    *p.Details.Memory.WorkingSet,
		"container_blkio_device_usage_total /dev/sda 8 0 Write": 13,
		"container_pressure_io_stalled_seconds_total":           p.Details.IOPressure.Full.Total / 1e9,
		"container_pressure_cpu_waiting_seconds_total":          p.Details.CPUPressure.Some.Total / 1e9,
		"container_pressure_memory_waiting_seconds_total":       p.Details.MemoryPressure.Some.Total / 1e9,
		"container_memory_failures_total pgmajfault container":  *p.Details.Memory.OwnMajorFaults,
		"container_memory_failures_total pgfault hierarchy":     *p.Details.Memory.Faults,
		"container_spec_memory_reservation_limit_bytes":         *p.Details.Limits.MemoryReservation,
		"container_network_receive_packets_total eth0":          p.Interfaces[0].RxPackets,
		"container_network_receive_errors_total eth0":           p.Interfaces[0].RxErrors,
		"container_network_transmit_packets_dropped_total eth0": p.Interfaces[0].TxDropped,
	})
	check(ofContainer, "nginx /kubepods/pod1/crius-2 registry.test/nginx@sha256:1 k8s_nginx_web_default_u-1_4 default web", map[string]uint64{
		"container_start_time_seconds":              21,
		"container_cpu_user_seconds_total":          *c.Details.CPU.User / 1e9,
		"container_cpu_system_seconds_total":        *c.Details.CPU.System / 1e9,
		"container_cpu_cfs_throttled_periods_total": *c.Details.CPU.ThrottledPeriods,
		"container_cpu_cfs_throttled_seconds_total": *c.Details.CPU.ThrottledTime / 1e9,
		"container_cpu_cfs_burst_periods_total":     *c.Details.CPU.Bursts,
		"container_memory_failcnt":                  *c.Details.Memory.LimitHits,
		"container_memory_max_usage_bytes":          *c.Details.Memory.MaxUsage,
		"container_memory_mapped_file":              *c.Details.Memory.Mapped,
		"container_memory_total_active_file_bytes":  *c.Details.Memory.ActiveFile,
		"container_fs_reads_bytes_total /dev/sda":   11,
		"container_fs_reads_total /dev/sda":         12,
		"container_fs_writes_total /dev/sda":        14,
		"container_fs_usage_bytes /dev/sdb":         15,
		"container_fs_limit_bytes /dev/sdb":         16,
		"container_fs_inodes_total /dev/sdb":        17,
		"container_fs_inodes_free /dev/sdb":         18,
		"container_processes":                       c.Processes.Count,
		"container_file_descriptors":                *c.Processes.Files,
		"container_sockets":                         *c.Processes.Sockets,
		"container_ulimits_soft max_open_files":     *c.Processes.FileLimit,
		"container_threads":                         *c.Details.Tasks,
		"container_threads_max":                     *c.Details.TaskLimit,
		"container_oom_events_total":                *c.Details.OOMKills,
		"container_hugetlb_failcnt 2MB":             *c.Details.HugePages[0].LimitHits,
		"container_hugetlb_max_usage_bytes 2MB":     *c.Details.HugePages[0].MaxUsage,
		"container_spec_cpu_quota":                  *c.Details.Limits.CPUQuota,
		"container_spec_cpu_shares":                 *c.Details.Limits.CPUShares,
		"container_spec_memory_swap_limit_bytes":    *c.Details.Limits.MemorySwap,
	})
}

// Values that the kernel does not report are missing from the metrics, and not
// 0.
func TestUnknownPodMetricsAreMissing(t *testing.T) {
	t.Parallel()
	p := somePodMetrics()
	c := p.Containers[0]
	p.Details, p.Interfaces, p.Sockets = cgroup.Details{}, nil, nil
	c.Details, c.Processes, c.Layer, c.Disk = cgroup.Details{}, nil, nil, nil
	ofPod, ofContainer, _ := podMetricsOf(t, p, AllPodMetrics)
	for _, m := range append(ofPod, ofContainer...) {
		if m.Name != "container_last_seen" && m.Name != "container_start_time_seconds" {
			t.Errorf("%s is %d", m.Name, m.Value.Value)
		}
	}
	p.Details.CPU = &cgroup.CPUDetails{Total: new(uint64(1)), Periods: new(uint64(2))}
	p.Details.Limits.CPUQuota = new(uint64) // none
	ofPod, _, _ = podMetricsOf(t, p, "cpu", "spec")
	for _, m := range ofPod {
		if strings.Contains(m.Name, "cfs") || strings.Contains(m.Name, "quota") {
			t.Errorf("without a quota %s is %d", m.Name, m.Value.Value)
		}
	}
	_, _, all := podMetricsOf(t, p, AllPodMetrics)
	a, err := newMetricsAPI(&fakeEngine{}, []string{AllPodMetrics})
	if err != nil {
		t.Fatal(err)
	}
	if missing := len(all) - len(a.metrics); missing != 6+3+2 {
		t.Errorf("%d metrics are missing where the kernel offers neither pressure (6), nor huge pages (3), nor bursts (2)", missing)
	}
}

func TestPodMetricsAreChosen(t *testing.T) {
	t.Parallel()
	if _, err := newMetricsAPI(&fakeEngine{}, []string{"cpu", "cpus"}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "diskIO") {
		t.Errorf("an unknown kind: %v", err)
	}
	var configured atomic.Pointer[[]string]
	configured.Store(new([]string))
	n := start(t, func(_ *Config, s *Services) { s.PodMetrics = func() []string { return *configured.Load() } })
	n.engine.metrics = []*usage.PodMetrics{somePodMetrics()}
	for kind, want := range map[string]usage.MetricParts{
		"cpu": {Cgroup: cgroup.CPUPart | cgroup.QuotaPart}, "memory": {Cgroup: cgroup.MemoryPart}, "network": {Interfaces: true},
		"disk": {Disk: true}, "diskIO": {Cgroup: cgroup.IOPart}, "process": {Cgroup: cgroup.TasksPart, Processes: true},
		"oom": {Cgroup: cgroup.OOMPart}, "pressure": {Cgroup: cgroup.PressurePart}, "hugetlb": {Cgroup: cgroup.HugePagesPart},
		"spec": {Cgroup: cgroup.LimitsPart | cgroup.QuotaPart}, "tcp": {TCP: true}, "udp": {UDP: true}, "": {},
	} {
		kinds := []string{kind}
		if kind == "" {
			kinds = nil
		}
		n.engine.measured = usage.MetricParts{}
		configured.Store(&kinds) // as by a reload
		resp, err := n.runtime.ListPodSandboxMetrics(t.Context(), &cri.ListPodSandboxMetricsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if n.engine.measured != want {
			t.Errorf("for %q %+v is measured, want %+v", kind, n.engine.measured, want)
		}
		if got := len(resp.PodMetrics); (got == 0) != (kind == "") {
			t.Errorf("for %q there are metrics of %d pods", kind, got)
		}
	}
}

func TestPodMetricsAreStreamed(t *testing.T) {
	t.Parallel()
	n := start(t)
	for range 40 {
		n.engine.metrics = append(n.engine.metrics, somePodMetrics())
	}
	list, err := n.runtime.ListPodSandboxMetrics(t.Context(), &cri.ListPodSandboxMetricsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := n.runtime.StreamPodSandboxMetrics(t.Context(), &cri.StreamPodSandboxMetricsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var all []*cri.PodSandboxMetrics
	messages := 0
	for ; ; messages++ {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, resp.PodSandboxMetrics...)
	}
	if messages < 2 {
		t.Errorf("%d pods came in %d messages", len(all), messages)
	}
	if len(all) != len(list.PodMetrics) || all[0].PodSandboxId != idOf(1) || all[0].ContainerMetrics[0].ContainerId != idOf(2) ||
		len(all[0].Metrics) != len(list.PodMetrics[0].Metrics) || proto.Size(all[39]) != proto.Size(list.PodMetrics[39]) {
		t.Errorf("%d pods are streamed, %d listed", len(all), len(list.PodMetrics))
	}
}

// A pod may have any number of interfaces and, with privileges, any names. A
// repeated series, or text that is not UTF-8, would cost a kubelet all metrics.
func TestInterfacesOfPodMetricsAreBounded(t *testing.T) {
	t.Parallel()
	p := somePodMetrics()
	p.Interfaces = []network.Interface{{Name: "a\xff", RxBytes: 1}, {Name: "a\xfe", RxBytes: 2}}
	for i := range 1000 {
		p.Interfaces = append(p.Interfaces, network.Interface{Name: fmt.Sprint("eth", i)})
	}
	ofPod, _, _ := podMetricsOf(t, p, "network")
	seen := map[string]int{}
	for _, m := range ofPod {
		if m.Name == "container_network_receive_bytes_total" {
			seen[m.LabelValues[len(baseLabels)]]++
		}
	}
	if len(seen) != maxInterfaces-1 || seen["eth61"] != 1 || seen["a\uFFFD"] != 1 {
		t.Errorf("interfaces are %v", seen)
	}
}

// A kubelet before CRI 0.38 reads whole seconds, a later one fractions.
func TestDurationsHaveFractions(t *testing.T) {
	t.Parallel()
	p := somePodMetrics()
	*p.Details.CPU.Total = 1_750_000_000
	ofPod, ofContainer, _ := podMetricsOf(t, p, AllPodMetrics)
	durations := 0
	for _, m := range append(ofPod, ofContainer...) {
		switch duration := strings.HasSuffix(m.Name, "_seconds_total"); {
		case duration != (m.DoubleValue != nil):
			t.Errorf("%s is %v and %v", m.Name, m.Value, m.DoubleValue)
		case !duration:
		case m.Value.GetValue() != uint64(m.DoubleValue.GetValue()):
			t.Errorf("%s is %d for older clients, and %v", m.Name, m.Value.GetValue(), m.DoubleValue.GetValue())
		default:
			durations++
		}
	}
	if durations < 10 {
		t.Errorf("only %d durations", durations)
	}
	i := slices.IndexFunc(ofPod, func(m *cri.Metric) bool { return m.Name == "container_cpu_usage_seconds_total" })
	if m := ofPod[i]; m.Value.GetValue() != 1 || m.DoubleValue.GetValue() != 1.75 {
		t.Errorf("1.75 s are %v and %v", m.Value, m.DoubleValue)
	}
}
