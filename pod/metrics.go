package pod

import (
	"context"
	"log/slog"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// MetricParts says what Metrics measures; what is not asked for costs nothing.
type MetricParts struct {
	Cgroup     cgroup.Parts
	Interfaces bool
	TCP, UDP   bool
	Disk       bool
	Processes  bool
}

// PodMetrics is all that is known of what a pod uses.
type PodMetrics struct {
	View *view.Sandbox
	// Cgroup is the pod's own, or the one that its infra container would have.
	Cgroup     string
	Details    cgroup.Details // of the pod's own cgroup, empty if it has none
	Interfaces []network.Interface
	Sockets    *network.Sockets // nil: not asked for, or not known
	Containers []*ContainerMetrics
}

// ContainerMetrics is all that is known of what a container uses. Only the
// containers that have not exited have any.
type ContainerMetrics struct {
	View      *view.Container
	Cgroup    string
	Details   cgroup.Details
	Processes *cgroup.Processes
	Layer     *storage.FsUsage // writable layer; nil: not measured yet
	Disk      *storage.FsSize  // the file system it is on
}

// MetricOffers is what the kernel tells beyond what all do.
func (e *Engine) MetricOffers() cgroup.Offers { return e.meters.Offers() }

// Metrics measures all ready pods, and those of their containers that have not
// exited, in no order. What vanished meanwhile is missing or has no values.
func (e *Engine) Metrics(ctx context.Context, parts MetricParts) []*PodMetrics {
	var sandboxes []*Sandbox
	var all []*PodMetrics
	for _, s := range e.sandboxes.all() {
		if v := s.view.Load(); v.State == cri.PodSandboxState_SANDBOX_READY {
			sandboxes = append(sandboxes, s)
			all = append(all, &PodMetrics{View: v, Cgroup: s.cgroup})
		}
	}
	var networks panics.Group
	networks.Go(func() { addTraffic(all, parts) })
	var disk *storage.FsSize
	if parts.Disk {
		if size, err := e.deps.Images.WritableSize(); err == nil {
			disk = &size
		} else {
			slog.Debug("cannot read the size of the containers' file system", "err", err)
		}
	}
	sideBySide(len(all), func(i int) { sandboxes[i].meterAll(ctx, all[i], parts, disk) })
	networks.Wait()
	return all
}

func (s *Sandbox) meterAll(ctx context.Context, m *PodMetrics, parts MetricParts, disk *storage.FsSize) {
	if s.meter != nil && s.meter.wholePod {
		m.Details = s.meter.details(parts.Cgroup)
	}
	for _, c := range s.now().containers {
		v := c.view.Load()
		if v.State == cri.ContainerState_CONTAINER_EXITED || c.meter == nil {
			continue
		}
		of := &ContainerMetrics{View: v, Cgroup: c.meter.path, Details: c.meter.details(parts.Cgroup), Disk: disk}
		if parts.Processes {
			of.Processes = c.meter.processes(v.PID)
		}
		if layer, ok := c.engine.deps.Images.WritableUsage(ctx, c.id); ok && parts.Disk {
			of.Layer = &layer
		}
		m.Containers = append(m.Containers, of)
	}
}

func (m *meter) details(parts cgroup.Parts) cgroup.Details {
	d, err := m.Details(parts)
	m.complain(err)
	return d
}

func (m *meter) processes(init int) *cgroup.Processes {
	p, err := m.Processes(init)
	m.complain(err)
	return p
}

// complain does so once.
func (m *meter) complain(err error) {
	if err != nil {
		m.complaint.Do(func() { slog.Debug("cannot read some counters of a cgroup", "err", err) })
	}
}

// addTraffic asks all pods that have a network of their own together, since to
// go into their namespaces takes a thread.
func addTraffic(all []*PodMetrics, parts MetricParts) {
	var own []*PodMetrics
	var paths []string
	for _, m := range all {
		if m.View.NetNS != "" {
			own = append(own, m)
			paths = append(paths, m.View.NetNS)
		}
	}
	if parts.Interfaces {
		counted, err := network.Usage(paths)
		if err != nil {
			slog.Debug("cannot read the network counters of some pods", "err", err)
		}
		for i, interfaces := range counted {
			own[i].Interfaces = interfaces
		}
	}
	sockets, err := network.CountSockets(paths, parts.TCP, parts.UDP)
	if err != nil {
		slog.Debug("cannot count the sockets of some pods", "err", err)
	}
	for i, s := range sockets {
		own[i].Sockets = s
	}
}
