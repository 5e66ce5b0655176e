package pod

import (
	"context"
	"log/slog"
	"path"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// Stats are read from the kernel's files and from what storage measured before:
// no lock of a container is taken, no runtime asked and no directory tree
// walked. What vanishes meanwhile has no value, which is no error.

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

// NetworkStats is what went through the interfaces of a pod that has a network
// of its own, but for its loopback.
type NetworkStats struct {
	Time    time.Time
	Default network.Interface   // the one that CNI made
	Others  []network.Interface // all but Default
}

// ContainerStats measures the containers that are wanted; they come in no order.
// One that was removed meanwhile may be missing.
func (e *Engine) ContainerStats(ctx context.Context, wanted func(*view.Container) bool) []*ContainerStats {
	var containers []*Container
	var stats []*ContainerStats
	for _, c := range e.containers.all() {
		if v := c.view.Load(); wanted(v) {
			containers = append(containers, c)
			stats = append(stats, &ContainerStats{View: v})
		}
	}
	sideBySide(len(stats), func(i int) { containers[i].measure(ctx, stats[i]) })
	return stats
}

// sideBySide calls f for 0 to n-1, on several CPUs if there is much to do.
func sideBySide(n int, f func(i int)) {
	const most = 4
	var next atomic.Int64
	var group panics.Group
	for range min(most, n, runtime.GOMAXPROCS(0)) {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	group.Wait()
}

func (c *Container) measure(ctx context.Context, s *ContainerStats) {
	if s.View.State != cri.ContainerState_CONTAINER_EXITED {
		s.Usage = c.usage(ctx)
	}
	if layer, ok := c.engine.deps.Images.WritableUsage(ctx, c.id); ok {
		s.Layer = &layer
	}
}

// usage is told by the kernel or, of a container that lives in a sandbox, by the
// runtime.
func (c *Container) usage(ctx context.Context) cgroup.Usage {
	if !c.sandbox.plan.Sandboxed {
		return c.meter.read()
	}
	u, err := c.now().task.Usage(ctx)
	if err != nil {
		slog.Debug("runtime reports no usage of a container", "container", c.id, "err", err)
	}
	return u
}

// SandboxStats measures the pods that are wanted, in no order.
func (e *Engine) SandboxStats(ctx context.Context, wanted func(*view.Sandbox) bool) []*SandboxStats {
	var sandboxes []*Sandbox
	var stats []*SandboxStats
	for _, s := range e.sandboxes.all() {
		if v := s.view.Load(); wanted(v) {
			sandboxes = append(sandboxes, s)
			stats = append(stats, &SandboxStats{View: v})
		}
	}
	var networks panics.Group
	networks.Go(func() { addNetworks(stats) })
	sideBySide(len(stats), func(i int) { sandboxes[i].measure(ctx, stats[i]) })
	networks.Wait()
	return stats
}

// measure leaves out the network.
func (s *Sandbox) measure(ctx context.Context, stats *SandboxStats) {
	for _, c := range s.now().containers {
		of := &ContainerStats{View: c.view.Load()}
		c.measure(ctx, of)
		stats.Containers = append(stats.Containers, of)
	}
	if stats.View.State != cri.PodSandboxState_SANDBOX_READY {
		return
	}
	own := s.meter.read()
	if s.meter != nil && s.meter.wholePod && !own.Gone() {
		stats.Usage = own
		return
	}
	parts := []cgroup.Usage{own}
	for _, c := range stats.Containers {
		parts = append(parts, c.Usage)
	}
	stats.Usage = total(parts)
}

// total leaves out what is gone, or has never been there.
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

// addNetworks asks all pods together, since to go into their namespaces takes a
// thread.
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

// networkStats always has a default interface, which kubelets take for granted;
// should it not be there, it has counted nothing.
func networkStats(name string, interfaces []network.Interface) *NetworkStats {
	n := &NetworkStats{Default: network.Interface{Name: name}}
	for _, i := range interfaces {
		if i.Name == name {
			n.Default = i
		} else {
			n.Others = append(n.Others, i)
		}
	}
	return n
}

// meter is a cgroup's meter that complains once.
type meter struct {
	*cgroup.Meter
	wholePod  bool // it is of a pod's own cgroup, or of its sandbox
	path      string
	complaint sync.Once
}

func (e *Engine) newMeter(cgroup string) *meter {
	m, err := e.meters.Of(cgroup)
	if err != nil {
		slog.Debug("cgroup cannot be measured", "err", err)
		return nil
	}
	return &meter{Meter: m, path: cgroup}
}

// read is empty for a container without a cgroup.
func (m *meter) read() cgroup.Usage {
	if m == nil {
		return cgroup.Usage{}
	}
	u, err := m.Read()
	m.complain(err)
	return u
}

// close lets go of the cgroup of what has ended.
func (m *meter) close() {
	if m != nil {
		m.Close()
	}
}

// podMeter is the pod's own cgroup if its client made one for it alone, with its
// meter, else that of an infra container. Such a one is measured if there is
// one, and the containers are added to it.
func (e *Engine) podMeter(id string, plan podPlan) (string, *meter) {
	cfg := plan.Config.M
	_, infra, err := e.cgroupOf(cfg, plan.CgroupPrefix, id)
	if err != nil {
		return "", nil
	}
	if parent := path.Dir(infra); isPodCgroup(parent, cfg) {
		m := e.newMeter(parent)
		if m != nil {
			m.wholePod = true
		}
		return parent, m
	}
	if plan.Infra {
		m := e.newMeter(infra)
		if m != nil {
			m.wholePod = plan.Sandboxed // in which all of them are
		}
		return infra, m
	}
	return infra, nil
}

// isPodCgroup tells whether a cgroup is the pod's own by its name, which a
// kubelet makes of the pod's uid: pod<uid>, or in the language of systemd
// kubepods-pod<uid with _ for ->.slice. Any other cgroup_parent may be shared
// with other pods or with the node's services, whose usage is not the pod's.
func isPodCgroup(cgroup string, cfg *cri.PodSandboxConfig) bool {
	uid := cfg.GetMetadata().GetUid()
	if uid == "" || cfg.GetLinux().GetCgroupParent() == "" {
		return false
	}
	name := path.Base(cgroup)
	if slice, ok := strings.CutSuffix(name, ".slice"); ok {
		return strings.HasSuffix(slice, "-pod"+strings.ReplaceAll(uid, "-", "_"))
	}
	return name == "pod"+uid
}
