package blueprint

import (
	"slices"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci/limits"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/records"
)

// FirstLimits returns the limits with which a container is created.
func FirstLimits(plan *records.ContainerPlan) *cri.LinuxContainerResources {
	asked := plan.Config.M.GetLinux().GetResources()
	if shares := asked.GetCpuShares(); plan.Workload.M == nil && spec.ClampShares(shares) == shares {
		return asked
	}
	return MergeLimits(asked, plan.Workload.M)
}

// MergeLimits returns the limits in force with those of r over them, CPU shares as the kernel
// clamps them. Fields of r that are not set count for nothing (CRI:
// UpdateContainerResourcesRequest), but where r has a memory limit and no limit of memory and
// swap together, that follows: the container may swap as much as before. It modifies neither.
func MergeLimits(inForce, r *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	merged := &cri.LinuxContainerResources{}
	if inForce != nil {
		merged = proto.CloneOf(inForce) // views refer to the old one
	}
	hugepages := merged.HugepageLimits
	merged.HugepageLimits = nil
	if memory, swap := r.GetMemoryLimitInBytes(), merged.MemorySwapLimitInBytes; memory != 0 && swap > 0 {
		merged.MemorySwapLimitInBytes = -1
		if memory > 0 && merged.MemoryLimitInBytes > 0 {
			merged.MemorySwapLimitInBytes = memory + swap - merged.MemoryLimitInBytes
		}
	}
	proto.Merge(merged, r)
	merged.CpuShares = spec.ClampShares(merged.CpuShares)
	for _, old := range hugepages {
		same := func(l *cri.HugepageLimit) bool { return l.GetPageSize() == old.GetPageSize() }
		if !slices.ContainsFunc(merged.HugepageLimits, same) {
			merged.HugepageLimits = append(merged.HugepageLimits, old)
		}
	}
	return merged
}

// Quota reads a CPU quota and its period, in microseconds; a quota of 0 is none.
type Quota func() (quota, period int64, err error)

// RuntimeSandboxLimits returns the limits of the runtime sandbox in which all containers of a pod
// with this request run. Cgroup v1 allows no CPU quota above that of the cgroup above, parent,
// which a kubelet raises after the sandbox's: until then the quota is clamped to the parent's. A
// virtual machine has neither quota nor memory limit: those of its containers are its size.
func (p *Planner) RuntimeSandboxLimits(cfg *cri.PodSandboxConfig, machine bool, parent Quota) (update limits.Update, clamped bool, err error) {
	set, err := spec.OwnKernelResources(cfg, machine, p.Host)
	update.Resources = set
	if err != nil || set.CPU == nil || set.CPU.Quota == nil {
		return update, false, err
	}
	most, per, err := parent()
	if err != nil || most == 0 {
		return update, false, err
	}
	period := int64(defaultPeriod)
	if set.CPU.Period != nil && *set.CPU.Period != 0 {
		period = int64(*set.CPU.Period)
	}
	if allowed := most * period / per; *set.CPU.Quota > allowed {
		set.CPU.Quota, clamped = &allowed, true
	}
	return update, clamped, nil
}

// defaultPeriod is the kernel's, in microseconds.
const defaultPeriod = 100_000
