// Package tuning deals with containers that have CPUs of their own.
//
// Errors wrap fault.Invalid.
package tuning

import (
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Container is what a plan depends on.
type Container struct {
	CgroupParent string // of its pod
	Limits       *cri.LinuxContainerResources
	PinExecs     bool // exec processes run on one CPU
}

// Plan is what is done for a container that has CPUs of its own.
type Plan struct {
	CPUs     Set
	PinExecs bool `json:",omitempty"`
}

// PlanFor is the plan for a container; nil: nothing is to be done for it.
func PlanFor(c Container) *Plan {
	cpus := own(c)
	if len(cpus) == 0 || !c.PinExecs {
		return nil
	}
	return &Plan{CPUs: cpus, PinExecs: true}
}

// own are the CPUs that a container has to itself: the kubelet gives them to containers
// of Guaranteed pods that ask for whole CPUs (its static CPU policy), and says so by their
// cpuset alone. Whether a cpuset is of that kind follows from the rest, as with CRI-O. The
// size has to be right as well.
func own(c Container) Set {
	if strings.Contains(c.CgroupParent, "burstable") || strings.Contains(c.CgroupParent, "besteffort") {
		return nil
	}
	const whole = 1024 // shares
	shares := c.Limits.GetCpuShares()
	cpus, err := ParseSet(c.Limits.GetCpusetCpus())
	if err != nil || shares <= 0 || shares%whole != 0 || int64(len(cpus)) != shares/whole {
		return nil
	}
	return cpus
}

// AddTo gives the plan's part to the spec of the container; nil has none.
func (p *Plan) AddTo(s *specs.Spec) {
	if p == nil || !p.PinExecs {
		return
	}
	first := strconv.Itoa(p.CPUs[0])
	s.Process.ExecCPUAffinity = &specs.CPUAffinity{Initial: first, Final: first}
}
