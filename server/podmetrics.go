package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/usage"
)

// metricsAPI is the part of RuntimeService that gives kubelets the metrics that
// they get from cAdvisor otherwise (KEP-2371), with the same names, labels and
// units; kubelets serve them at /metrics/cadvisor
// (docs/decisions/0007-pod-metrics.md).
type metricsAPI struct {
	usage   Usage
	metrics []podMetric // those that are configured and that the kernel supports
	parts   usage.MetricParts
}

// podMetric is a metric. It has values, or else one value and no labels of its
// own; nil values are left out. unless reports whether this kernel lacks it.
type podMetric struct {
	kind, name, help string
	gauge            bool
	duration         bool     // in seconds; its values here are nanoseconds
	labels           []string // its own, after baseLabels
	unless           func(cgroup.Offers) bool
	value            func(*sample) *uint64
	values           func(*sample, emit)
	measured         func(*sample) time.Time // nil: at the time of the call
}

// emit takes a value with the values of the metric's own labels.
type emit func(value *uint64, labels ...string)

// baseLabels are the labels that a kubelet gives every cAdvisor metric.
var baseLabels = []string{"container", "id", "image", "name", "namespace", "pod"}

// sample is a pod's or a container's part of the metrics.
type sample struct {
	labels    []string // values of baseLabels
	started   time.Time
	now       time.Time
	devices   deviceNames
	details   *cgroup.Details
	pod       *usage.PodMetrics       // nil: a container's sample
	container *usage.ContainerMetrics // nil: a pod's sample
}

// AllPodMetrics stands for all kinds of metrics.
const AllPodMetrics = "all"

// PodMetricKinds returns the kinds of pod metrics that can be chosen, by their
// names in CRI-O and cAdvisor.
func PodMetricKinds() []string {
	var kinds []string
	for _, m := range podMetrics() {
		if m.kind != "" && !slices.Contains(kinds, m.kind) {
			kinds = append(kinds, m.kind)
		}
	}
	return kinds
}

// DefaultPodMetricKinds returns the kinds that kubelets enable in cAdvisor by
// default.
func DefaultPodMetricKinds() []string {
	return []string{"cpu", "memory", "network", "disk", "diskIO", "process", "oom", "pressure", "spec"}
}

func newMetricsAPI(measured Usage, kinds []string) (*metricsAPI, error) {
	known := append(PodMetricKinds(), AllPodMetrics)
	for _, kind := range kinds {
		if !slices.Contains(known, kind) {
			return nil, fmt.Errorf("metrics.included_pod_metrics: unknown kind %s; use some of %v: %w", brief(kind), known, fault.Invalid)
		}
	}
	a := &metricsAPI{usage: measured}
	if len(kinds) == 0 {
		return a, nil
	}
	wanted := func(kind string) bool {
		return kind == "" || slices.Contains(kinds, AllPodMetrics) || slices.Contains(kinds, kind)
	}
	offers := measured.MetricOffers()
	for _, m := range podMetrics() {
		if wanted(m.kind) && (m.unless == nil || !m.unless(offers)) {
			a.metrics = append(a.metrics, m)
		}
	}
	parts := map[string]cgroup.Parts{
		"cpu": cgroup.CPUPart | cgroup.QuotaPart, "memory": cgroup.MemoryPart, "diskIO": cgroup.IOPart, "process": cgroup.TasksPart,
		"oom": cgroup.OOMPart, "pressure": cgroup.PressurePart, "hugetlb": cgroup.HugePagesPart, "spec": cgroup.LimitsPart | cgroup.QuotaPart,
	}
	for kind, part := range parts {
		if wanted(kind) {
			a.parts.Cgroup |= part
		}
	}
	a.parts.Interfaces, a.parts.TCP, a.parts.UDP = wanted("network"), wanted("tcp"), wanted("udp")
	a.parts.Disk, a.parts.Processes = wanted("disk"), wanted("process")
	return a, nil
}

func (a *metricsAPI) ListMetricDescriptors(context.Context, *cri.ListMetricDescriptorsRequest) (*cri.ListMetricDescriptorsResponse, error) {
	resp := &cri.ListMetricDescriptorsResponse{}
	for _, m := range a.metrics {
		resp.Descriptors = append(resp.Descriptors, &cri.MetricDescriptor{Name: m.name, Help: m.help, LabelKeys: slices.Concat(baseLabels, m.labels)})
	}
	return resp, nil
}

func (a *metricsAPI) ListPodSandboxMetrics(ctx context.Context, _ *cri.ListPodSandboxMetricsRequest) (*cri.ListPodSandboxMetricsResponse, error) {
	return &cri.ListPodSandboxMetricsResponse{PodMetrics: a.list(ctx)}, nil
}

func (a *metricsAPI) StreamPodSandboxMetrics(_ *cri.StreamPodSandboxMetricsRequest, out grpc.ServerStreamingServer[cri.StreamPodSandboxMetricsResponse]) error {
	return inChunks(a.list(out.Context()), messageSize, func(chunk []*cri.PodSandboxMetrics) error {
		return out.Send(&cri.StreamPodSandboxMetricsResponse{PodSandboxMetrics: chunk})
	})
}

func (a *metricsAPI) list(ctx context.Context) []*cri.PodSandboxMetrics {
	if len(a.metrics) == 0 {
		return nil
	}
	measured := a.usage.Metrics(ctx, a.parts)
	now, devices := time.Now(), deviceNames{}
	all := make([]*cri.PodSandboxMetrics, len(measured))
	for i, p := range measured {
		all[i] = &cri.PodSandboxMetrics{PodSandboxId: p.View.ID, Metrics: a.collect(podSample(p, now), devices)}
		for _, c := range p.Containers {
			all[i].ContainerMetrics = append(all[i].ContainerMetrics, &cri.ContainerMetrics{
				ContainerId: c.View.ID,
				Metrics:     a.collect(containerSample(p, c, now), devices),
			})
		}
	}
	return all
}

// podSample returns a sample with neither container nor image, like cAdvisor's
// metrics of a pod's cgroup: queries that add up containers exclude it by that.
// The names and attempts of pods are unique, and so is the name made of them: a
// kubelet that gets one series twice would discard all.
func podSample(p *usage.PodMetrics, now time.Time) *sample {
	m := p.View.Config.GetMetadata()
	return &sample{
		labels:  []string{"", p.Cgroup, "", podName(p.View), m.GetNamespace(), m.GetName()},
		started: p.View.CreatedAt, now: now, details: &p.Details, pod: p,
	}
}

func containerSample(p *usage.PodMetrics, c *usage.ContainerMetrics, now time.Time) *sample {
	m, of := c.View.Config.GetMetadata(), p.View.Config.GetMetadata()
	image := cmp.Or(c.View.Config.GetImage().GetUserSpecifiedImage(), c.View.ImageRef)
	return &sample{
		labels:  []string{m.GetName(), c.Cgroup, image, containerName(p.View, c.View), of.GetNamespace(), of.GetName()},
		started: c.View.Started(), now: now, details: &c.Details, container: c,
	}
}

func (a *metricsAPI) collect(s *sample, devices deviceNames) []*cri.Metric {
	s.devices = devices
	type cell struct {
		metric cri.Metric
		value  cri.UInt64Value
	}
	cells := make([]cell, 0, 2*len(a.metrics)) // in one block of memory; a few metrics have several values
	out := make([]*cri.Metric, 0, cap(cells))
	for i := range a.metrics {
		m := &a.metrics[i]
		add := func(n *uint64, labels ...string) {
			if n == nil {
				return
			}
			if len(cells) == cap(cells) {
				cells = make([]cell, 0, cap(cells))
			}
			cells = cells[:len(cells)+1]
			c := &cells[len(cells)-1]
			c.value.Value = *n
			if m.duration {
				// Clients before CRI 0.38 know whole numbers only.
				c.value.Value = *n / uint64(time.Second)
				c.metric.DoubleValue = &cri.DoubleValue{Value: time.Duration(*n).Seconds()}
			}
			c.metric.Name, c.metric.Value, c.metric.LabelValues = m.name, &c.value, s.labels
			if len(labels) > 0 {
				c.metric.LabelValues = slices.Concat(s.labels, labels)
			}
			if m.measured != nil {
				c.metric.Timestamp = m.measured(s).UnixNano()
			}
			if m.gauge {
				c.metric.MetricType = cri.MetricType_GAUGE
			}
			out = append(out, &c.metric)
		}
		if m.values != nil {
			m.values(s, add)
		} else {
			add(m.value(s))
		}
	}
	return out
}
