package tuning

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// Wishes are what annotations of a pod request for its containers with
// exclusive CPUs.
type Wishes struct {
	NoInterrupts bool
	Housekeeping bool     // with NoInterrupts: a container's first CPU and its siblings do get interrupts
	NoBalancing  bool     // the scheduler does not move processes between the CPUs
	NoQuota      bool     // of CFS
	Latency      string   // value of pm_qos_resume_latency_us; empty: unchanged
	Governor     string   // of cpufreq; empty: unchanged
	Shared       []string // containers that get the node's shared CPUs as well
}

// Any reports whether anything is requested.
func (w Wishes) Any() bool {
	return w.NoInterrupts || w.NoBalancing || w.NoQuota || w.Latency != "" || w.Governor != "" || len(w.Shared) > 0
}

// Container is the input of a plan.
type Container struct {
	Name         string
	CgroupParent string // of its pod
	Limits       *cri.LinuxContainerResources
	Wishes       Wishes
	PinExecs     bool // exec processes run on one CPU
}

// Plan is what is done for a container with exclusive CPUs.
type Plan struct {
	CPUs         Set    `json:"CPUs"`
	Shared       Set    `json:"Shared,omitempty"`       // CPUs that it gets as well
	Quiet        Set    `json:"Quiet,omitempty"`        // those of its CPUs that get no interrupts
	Housekeeping Set    `json:"Housekeeping,omitempty"` // those that do, by request
	NoBalancing  bool   `json:"NoBalancing,omitempty"`
	PodQuota     bool   `json:"PodQuota,omitempty"` // the quota of its pod's cgroup is lifted
	Latency      string `json:"Latency,omitempty"`
	Governor     string `json:"Governor,omitempty"`
	PinExecs     bool   `json:"PinExecs,omitempty"`
}

// Plan returns the plan for a container, and limits that it needs over the
// requested ones. Both are nil if there is nothing to do, as for every
// container without exclusive CPUs.
func (t *Tuner) Plan(c Container) (*Plan, *cri.LinuxContainerResources, error) {
	cpus, w := own(c), c.Wishes
	if len(cpus) == 0 || !w.Any() && !c.PinExecs {
		return nil, nil, nil
	}
	p := &Plan{CPUs: cpus, NoBalancing: w.NoBalancing, Latency: w.Latency, Governor: w.Governor, PinExecs: c.PinExecs}
	if slices.Contains(w.Shared, c.Name) {
		if len(t.shared) == 0 {
			return nil, nil, invalid("container %s asks for the node's shared CPUs, but tuning.shared_cpuset is empty", c.Name)
		}
		p.Shared = t.shared
	}
	if w.Housekeeping {
		siblings, err := t.siblings(cpus[0])
		if err != nil {
			return nil, nil, err
		}
		p.Housekeeping = cpus.and(siblings)
	}
	if w.NoInterrupts {
		p.Quiet = cpus.minus(p.Housekeeping)
	}
	if !w.NoQuota && len(p.Shared) == 0 {
		return p, nil, nil
	}
	// The quota for its own CPUs is too small once it has the shared ones too,
	// and a quota for all of them would not limit anything.
	p.PodQuota = c.CgroupParent != ""
	limits := &cri.LinuxContainerResources{CpuQuota: -1, CpuPeriod: cmp.Or(c.Limits.GetCpuPeriod(), 100_000)} // the kernel's default
	if len(p.Shared) > 0 {
		limits.CpusetCpus = cpus.plus(p.Shared).String()
	}
	return p, limits, nil
}

// own returns a container's exclusive CPUs: the kubelet gives them to
// containers of Guaranteed pods that request whole CPUs (its static CPU
// policy), and shows it only by their cpuset. own infers from the other limits
// whether a cpuset is of that kind, as CRI-O does. The size must match as well.
func own(c Container) Set {
	if strings.Contains(c.CgroupParent, "burstable") || strings.Contains(c.CgroupParent, "besteffort") {
		return nil
	}
	const whole, most = 1024, 262144 // shares; the kubelet requests no more, however many CPUs
	shares := c.Limits.GetCpuShares()
	cpus, err := ParseSet(c.Limits.GetCpusetCpus())
	if err != nil || shares <= 0 || shares != min(int64(len(cpus))*whole, most) {
		return nil
	}
	return cpus
}

// AddTo writes the plan's part into the container's spec; nil has none. The
// variables are CRI-O's.
func (p *Plan) AddTo(s *specs.Spec) {
	if p == nil {
		return
	}
	if len(p.Shared) > 0 {
		s.Process.Env = append(s.Process.Env, "OPENSHIFT_ISOLATED_CPUS="+p.CPUs.String(), "OPENSHIFT_SHARED_CPUS="+p.Shared.String())
	}
	if len(p.Housekeeping) > 0 {
		s.Process.Env = append(s.Process.Env, "OPENSHIFT_HOUSEKEEPING_CPUS="+p.Housekeeping.String())
	}
	if !p.PinExecs {
		return
	}
	first := p.CPUs[0]
	if len(p.Shared) > 0 {
		first = p.Shared[0]
	}
	s.Process.ExecCPUAffinity = &specs.CPUAffinity{Final: strconv.Itoa(first)}
	// CPUs isolated in a partition can only be used inside the container's
	// cgroup, so the runtime cannot run on them before it has joined that.
	if !p.NoBalancing {
		s.Process.ExecCPUAffinity.Initial = s.Process.ExecCPUAffinity.Final
	}
}

// Changes reports whether the plan changes anything on the node; nil does not.
func (p *Plan) Changes() bool {
	return p != nil && (len(p.Quiet) > 0 || p.NoBalancing || p.PodQuota || p.Latency != "" || p.Governor != "")
}

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, fault.Invalid)...)
}
