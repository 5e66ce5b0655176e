package main

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/google/cadvisor/container"
	info "github.com/google/cadvisor/info/v1"
	v2 "github.com/google/cadvisor/info/v2"
	"github.com/google/cadvisor/metrics"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"k8s.io/utils/clock"
)

// metric is a metric of crius or of cAdvisor.
type metric struct {
	Help   string
	Type   string   // COUNTER or GAUGE
	Labels []string // keys, in any order
	Values []string // of the metric's own labels, if those are fixed
}

// kinds are cAdvisor's names for crius's kinds of metrics. Those of spec come
// with all.
var kinds = map[string]container.MetricSet{
	"cpu":      {container.CpuUsageMetrics: {}},
	"memory":   {container.MemoryUsageMetrics: {}},
	"network":  {container.NetworkUsageMetrics: {}},
	"disk":     {container.DiskUsageMetrics: {}},
	"diskIO":   {container.DiskIOMetrics: {}},
	"process":  {container.ProcessMetrics: {}},
	"oom":      {container.OOMMetrics: {}},
	"pressure": {container.PressureMetrics: {}},
	"hugetlb":  {container.HugetlbUsageMetrics: {}},
	"tcp":      {container.NetworkTcpUsageMetrics: {}},
	"udp":      {container.NetworkUdpUsageMetrics: {}},
	"spec":     {},
}

// kindsLeftOut are cAdvisor's other kinds, with the reason.
var kindsLeftOut = map[container.MetricKind]string{
	container.CpuLoadMetrics:                 "always 0 in kubelets, which start no load reader",
	container.AppMetrics:                     "of Docker's labels",
	container.CPUTopologyMetrics:             "of the machine",
	container.PerCpuUsageMetrics:             "off in kubelets",
	container.ProcessSchedulerMetrics:        "off in kubelets",
	container.MemoryNumaMetrics:              "off in kubelets",
	container.CPUSetMetrics:                  "off in kubelets",
	container.NetworkAdvancedTcpUsageMetrics: "off in kubelets",
	container.PerfMetrics:                    "off in kubelets",
	container.ReferencedMemoryMetrics:        "off in kubelets",
	container.ResctrlMetrics:                 "off in kubelets",
}

// leftOut are metrics that crius does not have, with the reason
// (docs/decisions/0007-pod-metrics.md).
var leftOut = map[string]string{
	"container_scrape_error":                      "of the scrape, which is the kubelet's",
	"cadvisor_version_info":                       "of cAdvisor itself",
	"container_health_state":                      "always -1 for what is not Docker's, and CRI has no negative numbers",
	"container_fs_sector_reads_total":             "no kernel since 5.0 counts it by cgroup",
	"container_fs_sector_writes_total":            "no kernel since 5.0 counts it by cgroup",
	"container_fs_reads_merged_total":             "kernels built for debugging BFQ alone count it by cgroup",
	"container_fs_writes_merged_total":            "kernels built for debugging BFQ alone count it by cgroup",
	"container_fs_read_seconds_total":             "kernels built for debugging BFQ alone count it by cgroup",
	"container_fs_write_seconds_total":            "kernels built for debugging BFQ alone count it by cgroup",
	"container_fs_io_current":                     "kernels built for debugging BFQ alone count it by cgroup",
	"container_fs_io_time_seconds_total":          "kernels built for debugging BFQ alone count it by cgroup",
	"container_fs_io_time_weighted_seconds_total": "no kernel counts it by cgroup",
	"container_fs_io_cost_usage_seconds_total":    "for the administrator of iocost alone",
	"container_fs_io_cost_wait_seconds_total":     "for the administrator of iocost alone",
	"container_fs_io_cost_indebt_seconds_total":   "for the administrator of iocost alone",
	"container_fs_io_cost_indelay_seconds_total":  "for the administrator of iocost alone",
}

// compareMetrics takes crius's metrics by kind and name.
func compareMetrics(crius map[string]map[string]metric) error {
	var differences []string
	differ := func(format string, args ...any) { differences = append(differences, fmt.Sprintf(format, args...)) }
	for kind, set := range kinds {
		theirs, err := cadvisorMetrics(set)
		if err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
		ours := crius[kind]
		if ours == nil {
			differ("crius has no kind %s", kind)
		}
		for name, want := range theirs {
			spec := strings.HasPrefix(name, "container_spec_")
			got, ok := ours[name]
			switch {
			case !ok && leftOut[name] == "" && (!spec || kind == "spec"):
				differ("%s: crius has no %s", kind, name)
			case ok && leftOut[name] != "":
				differ("%s: crius has %s, which it was to leave out", kind, name)
			case ok && !equal(got, want):
				differ("%s: %s is %+v, want %+v", kind, name, got, want)
			}
		}
		for name := range ours {
			if _, ok := theirs[name]; !ok {
				differ("%s: cAdvisor has no %s", kind, name)
			}
		}
	}
	known := container.MetricSet{}
	for _, set := range kinds {
		known = known.Append(set)
	}
	for kind := range container.AllMetrics {
		if (kindsLeftOut[kind] == "") != known.Has(kind) {
			differ("cAdvisor's kind %s is neither compared nor left out, or both", kind)
		}
	}
	for kind := range crius {
		if _, ok := kinds[kind]; !ok {
			differ("kind %s is compared with nothing", kind)
		}
	}
	if len(differences) > 0 {
		return errors.New(strings.Join(differences, "\n"))
	}
	return nil
}

func equal(got, want metric) bool {
	slices.Sort(got.Labels)
	slices.Sort(want.Labels)
	sameValues := true
	if fixed := slices.Contains(want.Labels, "tcp_state") || slices.Contains(want.Labels, "udp_state") ||
		slices.Contains(want.Labels, "failure_type") || slices.Contains(want.Labels, "cpu"); fixed {
		slices.Sort(got.Values)
		slices.Sort(want.Values)
		sameValues = slices.Equal(got.Values, want.Values)
	}
	return got.Help == want.Help && got.Type == want.Type && slices.Equal(got.Labels, want.Labels) && sameValues
}

// cadvisorMetrics returns what cAdvisor's collector reports for a container
// that uses some of everything, with the labels that kubelets give it.
func cadvisorMetrics(set container.MetricSet) (map[string]metric, error) {
	collector := metrics.NewPrometheusCollector(provider{}, kubeletLabels, set, clock.RealClock{}, v2.RequestOptions{})
	registry := prometheus.NewRegistry()
	if err := registry.Register(collector); err != nil {
		return nil, err
	}
	families, err := registry.Gather()
	if err != nil {
		return nil, err
	}
	all := map[string]metric{}
	for _, f := range families {
		m := metric{Help: f.GetHelp(), Type: f.GetType().String()}
		for _, l := range f.GetMetric()[0].GetLabel() {
			m.Labels = append(m.Labels, l.GetName())
		}
		for _, sample := range f.GetMetric() {
			m.Values = append(m.Values, ownValues(sample))
		}
		all[f.GetName()] = m
	}
	return all, nil
}

// ownValues returns the values of the labels that not every metric has, sorted
// by key.
func ownValues(sample *dto.Metric) string {
	var own []string
	for _, l := range sample.GetLabel() {
		if _, base := kubeletLabels(nil)[l.GetName()]; !base {
			own = append(own, l.GetName()+"="+l.GetValue())
		}
	}
	slices.Sort(own)
	return strings.Join(own, ",")
}

// kubeletLabels are those of pkg/kubelet/server in Kubernetes.
func kubeletLabels(*info.ContainerInfo) map[string]string {
	return map[string]string{"id": "i", "name": "n", "image": "m", "pod": "p", "namespace": "ns", "container": "c"}
}

// provider knows one container, which has and uses some of everything.
type provider struct{}

func (provider) GetRequestedContainersInfo(string, v2.RequestOptions) (map[string]*info.ContainerInfo, error) {
	c := &info.ContainerInfo{Stats: []*info.ContainerStats{{}}}
	fill(reflect.ValueOf(&c.Spec).Elem())
	fill(reflect.ValueOf(c.Stats[0]).Elem())
	c.Stats[0].Cpu.Usage.PerCpu = nil // kubelets leave it out
	c.Stats[0].Filesystem[0].Device = "/dev/another"
	return map[string]*info.ContainerInfo{"c": c}, nil
}

func (provider) GetVersionInfo() (*info.VersionInfo, error) { return &info.VersionInfo{}, nil }
func (provider) GetMachineInfo() (*info.MachineInfo, error) { return &info.MachineInfo{}, nil }

// fill gives everything in v a value.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("x")
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(1)
	case reflect.Float32, reflect.Float64:
		v.SetFloat(1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key)
		fill(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i))
			}
		}
	}
}
