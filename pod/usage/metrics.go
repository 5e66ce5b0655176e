package usage

import (
	"context"
	"log/slog"
	"slices"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// MetricParts says what Metrics measures; parts that are not wanted cost nothing.
type MetricParts struct {
	Cgroup     cgroup.Parts
	Interfaces bool
	TCP, UDP   bool
	Disk       bool
	Processes  bool
}

// PodMetrics is everything that is known about what a pod uses.
type PodMetrics struct {
	View *view.Sandbox
	// Cgroup is the pod's own, or the one that its infra container would have.
	Cgroup     string
	Details    cgroup.Details // of the pod's own cgroup, empty if it has none
	Interfaces []network.Interface
	Sockets    *network.Sockets // nil: not wanted, or not known
	Containers []*ContainerMetrics
}

// ContainerMetrics is everything that is known about what a container uses. Only containers
// that have not exited have metrics.
type ContainerMetrics struct {
	View      *view.Container
	Cgroup    string
	Details   cgroup.Details
	Processes *cgroup.Processes
	Layer     *storage.FsUsage // writable layer; nil: not measured yet
	Disk      *storage.FsSize  // the file system it is on
}

// MetricOffers is what the kernel reports beyond what all do.
func (r *Reader) MetricOffers() cgroup.Offers { return r.Meters.Offers() }

// Metrics measures all ready pods, and those of their containers that have not
// exited, in no order. What vanished meanwhile is missing or has no values.
func (r *Reader) Metrics(ctx context.Context, parts MetricParts) []*PodMetrics {
	ready := slices.DeleteFunc(r.Sandboxes(), func(s Sandbox) bool { return s.View.State != cri.PodSandboxState_SANDBOX_READY })
	all := make([]*PodMetrics, len(ready))
	for i, s := range ready {
		all[i] = &PodMetrics{View: s.View, Cgroup: s.Cgroup}
	}
	var networks panics.Group
	networks.Go(func() { addTraffic(all, parts) })
	var disk *storage.FsSize
	if parts.Disk {
		if size, err := r.Images.WritableSize(); err == nil {
			disk = &size
		} else {
			slog.DebugContext(ctx, "cannot read the size of the containers' file system", "err", err)
		}
	}
	sideBySide(len(all), func(i int) { r.measure(ctx, ready[i], all[i], parts, disk) })
	networks.Wait()
	return all
}

func (r *Reader) measure(ctx context.Context, s Sandbox, m *PodMetrics, parts MetricParts, disk *storage.FsSize) {
	if s.Meter != nil && s.Meter.wholePod {
		m.Details = s.Meter.details(parts.Cgroup)
	}
	for _, c := range s.Containers() {
		if c.View.State == cri.ContainerState_CONTAINER_EXITED || c.Meter == nil {
			continue
		}
		of := &ContainerMetrics{View: c.View, Cgroup: c.Meter.path, Details: c.Meter.details(parts.Cgroup), Disk: disk}
		if parts.Processes {
			of.Processes = c.Meter.processes(c.View.PID)
		}
		if layer, ok := r.Images.WritableUsage(ctx, c.View.ID); ok && parts.Disk {
			of.Layer = &layer
		}
		m.Containers = append(m.Containers, of)
	}
}

// addTraffic measures the networks of all pods that have one together, since entering their
// namespaces takes a thread.
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
