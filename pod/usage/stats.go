// Package usage measures what pods and containers use. It reads the kernel's files and earlier
// measurements of storage: it takes no lock of a container, walks no directory tree, and asks a
// runtime only about sandboxed containers. A runtime that does not answer delays a call by
// seconds, however many containers it has.
package usage

import (
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// ContainerStats is what a container uses.
type ContainerStats struct {
	View  *view.Container
	Usage cgroup.Usage     // all nil unless it has processes
	Layer *storage.FsUsage // writable layer; nil: not measured yet
}

// SandboxStats is what a pod uses.
type SandboxStats struct {
	View       *view.Sandbox
	Usage      cgroup.Usage // all nil unless it is ready
	Network    *NetworkStats
	Containers []*ContainerStats
}

// NetworkStats is the traffic of the interfaces of a pod that has its own network, except for
// its loopback and for those that Kata adds, whose traffic is that of the others once more.
type NetworkStats struct {
	Time    time.Time
	Default network.Interface   // the one that CNI made
	Others  []network.Interface // all but Default
}

// Reporter asks a runtime what its container uses, until ctx ends; oci.Task implements it.
type Reporter interface {
	Usage(ctx context.Context) (cgroup.Usage, error)
}

// Container is a container to measure.
type Container struct {
	View  *view.Container
	Meter *Meter   // nil: its cgroup cannot be measured
	Task  Reporter // asked instead of the kernel about a sandboxed container; nil: ask the kernel
}

// Sandbox is a pod to measure.
type Sandbox struct {
	View       *view.Sandbox
	Meter      *Meter // nil: only the containers use anything
	Cgroup     string // the pod's own, or the one that its infra container would have
	Containers func() []Container
}

// Images is what is needed of storage.
type Images interface {
	WritableUsage(ctx context.Context, id string) (usage storage.FsUsage, ok bool)
	WritableSize() (storage.FsSize, error)
}

// Reader measures the pods and containers that Sandboxes and Containers list, each with its
// view at that moment. Objects that vanish meanwhile have no value, which is no error.
type Reader struct {
	Images     Images
	Meters     *cgroup.Meters
	Sandboxes  func() []Sandbox
	Containers func() []Container

	questions questions
}

// ContainerStats measures the containers that are wanted, in no order.
func (r *Reader) ContainerStats(ctx context.Context, wanted func(*view.Container) bool) []*ContainerStats {
	containers := slices.DeleteFunc(r.Containers(), func(c Container) bool { return !wanted(c.View) })
	reported := r.ask(ctx, containers)
	stats := make([]*ContainerStats, len(containers))
	sideBySide(len(stats), func(i int) { stats[i] = r.container(ctx, containers[i], reported) })
	return stats
}

// container returns what a container uses, with what runtimes have reported. Without a report
// the usage of a container in a runtime sandbox is unknown.
func (r *Reader) container(ctx context.Context, c Container, reported map[string]cgroup.Usage) *ContainerStats {
	s := &ContainerStats{View: c.View}
	switch {
	case c.View.State == cri.ContainerState_CONTAINER_EXITED:
	case c.Task != nil:
		s.Usage = reported[c.View.ID]
	default:
		s.Usage = c.Meter.read()
	}
	if layer, ok := r.Images.WritableUsage(ctx, c.View.ID); ok {
		s.Layer = &layer
	}
	return s
}

// SandboxStats measures the pods that are wanted, in no order.
func (r *Reader) SandboxStats(ctx context.Context, wanted func(*view.Sandbox) bool) []*SandboxStats {
	sandboxes := slices.DeleteFunc(r.Sandboxes(), func(s Sandbox) bool { return !wanted(s.View) })
	stats := make([]*SandboxStats, len(sandboxes))
	containers := make([][]Container, len(sandboxes))
	for i, s := range sandboxes {
		stats[i] = &SandboxStats{View: s.View}
		containers[i] = s.Containers()
	}
	var networks panics.Group
	networks.Go(func() { addNetworks(stats) })
	reported := r.ask(ctx, containers...)
	sideBySide(len(stats), func(i int) {
		stats[i].Containers = make([]*ContainerStats, len(containers[i]))
		for n, c := range containers[i] {
			stats[i].Containers[n] = r.container(ctx, c, reported)
		}
		sandboxes[i].measure(stats[i])
	})
	networks.Wait()
	return stats
}

// measure adds what the pod uses, except for its network, to the stats of its containers.
func (s Sandbox) measure(stats *SandboxStats) {
	if stats.View.State != cri.PodSandboxState_SANDBOX_READY {
		return
	}
	own := s.Meter.read()
	if s.Meter != nil && s.Meter.wholePod && !own.Gone() {
		stats.Usage = own
		return
	}
	parts := []cgroup.Usage{own}
	for _, c := range stats.Containers {
		parts = append(parts, c.Usage)
	}
	stats.Usage = total(parts)
}

// sideBySide calls f for 0 to n-1, on several CPUs if there is much to do.
func sideBySide(n int, f func(i int)) { spread(min(4, runtime.GOMAXPROCS(0)), n, f) }

// spread calls f for 0 to n-1, at most so many at a time.
func spread(most, n int, f func(i int)) {
	var next atomic.Int64
	var group panics.Group
	for range min(most, n) {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	group.Wait()
}

// total adds up what is known; parts that are gone, or were never there, do not count.
func total(parts []cgroup.Usage) (sum cgroup.Usage) {
	for _, part := range parts {
		switch {
		case part.Gone():
		case sum.Gone():
			sum = part
		default:
			sum.Add(part)
		}
	}
	return sum
}

// addNetworks measures the networks of all pods together, since entering their namespaces takes
// a thread.
func addNetworks(stats []*SandboxStats) {
	var own []*SandboxStats
	var paths []string
	for _, s := range stats {
		if s.View.NetNS != "" {
			own = append(own, s)
			paths = append(paths, s.View.NetNS)
		}
	}
	now := time.Now()
	counted, err := network.Usage(paths)
	if err != nil {
		slog.Debug("cannot read the network counters of some pods", "err", err)
	}
	for i, interfaces := range counted {
		if interfaces != nil {
			own[i].Network = networkStats(own[i].View.Interface, interfaces)
			own[i].Network.Time = now
		}
	}
}

// networkStats always has a default interface, because kubelets rely on it; if it is not there,
// its counters are zero.
func networkStats(name string, interfaces []network.Interface) *NetworkStats {
	n := &NetworkStats{Default: network.Interface{Name: name}}
	for _, i := range interfaces {
		switch {
		case i.Name == name:
			n.Default = i
		case !strings.HasSuffix(i.Name, "_kata"):
			n.Others = append(n.Others, i)
		}
	}
	return n
}
