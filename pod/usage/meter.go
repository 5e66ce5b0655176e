package usage

import (
	"log/slog"
	"path"
	"strings"
	"sync"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
)

// Meter is a cgroup's meter that logs its first error. A nil one measures nothing.
type Meter struct {
	*cgroup.Meter
	wholePod bool // it measures a pod's own cgroup, or its runtime sandbox
	path     string
	failed   sync.Once
}

// NewMeter returns the meter of a cgroup, nil if that cannot be measured.
func NewMeter(meters *cgroup.Meters, cgroup string) *Meter {
	m, err := meters.Of(cgroup)
	if err != nil {
		slog.Debug("cgroup cannot be measured", "err", err)
		return nil
	}
	return &Meter{Meter: m, path: cgroup}
}

// NewPodMeter returns the cgroup and the meter of a pod by the cgroup that its infra
// container has or would have. That is the pod's own cgroup if its client made one for
// it alone, else the one of the infra container. The latter is measured if the pod has
// an infra container, and the containers' usage is added unless they are all in it
// (sandboxed).
func NewPodMeter(meters *cgroup.Meters, cfg *cri.PodSandboxConfig, infraCgroup string, infra, sandboxed bool) (string, *Meter) {
	parent := path.Dir(infraCgroup)
	own := isPodCgroup(parent, cfg)
	switch {
	case own:
		infraCgroup = parent
	case !infra:
		return infraCgroup, nil
	}
	m := NewMeter(meters, infraCgroup)
	if m != nil {
		m.wholePod = own || sandboxed
	}
	return infraCgroup, m
}

// Anonymous returns the bytes of memory that no file has, in RAM and in swap; 0: unknown.
func (m *Meter) Anonymous() uint64 {
	u := m.read()
	if u.Memory == nil || u.Memory.RSS == nil {
		return 0
	}
	bytes := *u.Memory.RSS
	if u.Swap != nil {
		bytes += u.Swap.Usage
	}
	return bytes
}

// read returns the usage of the cgroup; empty for a container without one.
func (m *Meter) read() cgroup.Usage {
	if m == nil {
		return cgroup.Usage{}
	}
	u, err := m.Read()
	m.complain(err)
	return u
}

// Close releases the cgroup of an ended container or pod.
func (m *Meter) Close() {
	if m != nil {
		m.Meter.Close()
	}
}

func (m *Meter) details(parts cgroup.Parts) cgroup.Details {
	d, err := m.Details(parts)
	m.complain(err)
	return d
}

func (m *Meter) processes(init int) *cgroup.Processes {
	p, err := m.Processes(init)
	m.complain(err)
	return p
}

// complain logs the first error.
func (m *Meter) complain(err error) {
	if err != nil {
		m.failed.Do(func() { slog.Debug("cannot read some counters of a cgroup", "err", err) })
	}
}

// isPodCgroup reports whether a cgroup is the pod's own, by the name that a kubelet makes from
// the pod's uid: pod<uid> or, with systemd, kubepods-pod<uid with _ for ->.slice. Any other
// cgroup_parent may be shared with other pods or with the node's services, whose usage is not
// the pod's.
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
