package spec

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// resources writes the cgroup path and its limits.
func resources(in *Input, s *specs.Spec) error {
	r, err := Resources(cmp.Or(in.Asked.Resources, in.Request.Container.GetLinux().GetResources()), in.Facts.Host)
	if err != nil {
		return err
	}
	s.Linux.CgroupsPath = in.Facts.CgroupsPath
	s.Linux.Resources = r
	// A new cgroup has no quota, and crun 1.8.1 fails to write "no limit" on
	// cgroup v1.
	if r.CPU != nil && r.CPU.Quota != nil && *r.CPU.Quota == -1 {
		r.CPU.Quota = nil
	}
	// Left out when unlimited: crun 1.8.1 would write "-1" into pids.max. A
	// default that nobody requested must not fail on a node without the pids
	// controller.
	if _, own := r.Unified["pids.max"]; in.Defaults.PidsLimit > 0 && in.Facts.Host.PidsController && !own {
		limit := in.Defaults.PidsLimit
		r.Pids = &specs.LinuxPids{Limit: &limit}
	}
	return nil
}

// Resources translates cgroup limits, for a new container and for an update.
// Zero values mean "not specified" and are left out; nil gives empty limits.
func Resources(r *cri.LinuxContainerResources, host Host) (*specs.LinuxResources, error) {
	out := &specs.LinuxResources{}
	var err error
	if out.CPU, err = cpu(r); err != nil {
		return nil, err
	}
	if out.Memory, err = memory(r, host); err != nil {
		return nil, err
	}
	if out.HugepageLimits, err = hugepages(r, host); err != nil {
		return nil, err
	}
	if out.Unified, err = unified(r, host); err != nil {
		return nil, err
	}
	return out, nil
}

var cpuList = regexp.MustCompile(`^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$`)

func cpu(r *cri.LinuxContainerResources) (*specs.LinuxCPU, error) {
	if r.GetCpuShares() < 0 || r.GetCpuPeriod() < 0 {
		return nil, invalid("cpu_shares %d and cpu_period %d must not be negative", r.GetCpuShares(), r.GetCpuPeriod())
	}
	// The kernel's bounds (kernel/sched/core.c: a period from 1 ms to 1 s, no
	// quota below 1 ms), checked before anything is written.
	if p := r.GetCpuPeriod(); p != 0 && (p < 1000 || p > 1_000_000) {
		return nil, invalid("cpu_period %d is not between 1000 and 1000000 microseconds", p)
	}
	if q := r.GetCpuQuota(); q < -1 || q > 0 && q < 1000 {
		return nil, invalid("cpu_quota %d is less than 1000 microseconds and not -1 for no limit", q)
	}
	for _, list := range []string{r.GetCpusetCpus(), r.GetCpusetMems()} {
		if list != "" && !cpuList.MatchString(list) {
			return nil, invalid("cpuset %.80q is not a list of numbers and ranges", list)
		}
	}
	out := specs.LinuxCPU{Cpus: r.GetCpusetCpus(), Mems: r.GetCpusetMems()}
	if shares := uint64(ClampShares(r.GetCpuShares())); shares != 0 {
		out.Shares = &shares
	}
	if period := uint64(r.GetCpuPeriod()); period != 0 {
		out.Period = &period
	}
	if quota := r.GetCpuQuota(); quota != 0 {
		out.Quota = &quota
	}
	if out == (specs.LinuxCPU{}) {
		return nil, nil
	}
	return &out, nil
}

// ClampShares returns CPU shares as the kernel has them in force: from 2 to 262144. 0 means
// that they are not set.
func ClampShares(shares int64) int64 {
	const least, most = 2, 1 << 18 // MIN_SHARES and MAX_SHARES in kernel/sched/sched.h
	if shares == 0 {
		return 0
	}
	return max(least, min(shares, most))
}

// memory sets the limit of memory plus swap to the memory limit if the request
// does not set it: a container swaps only if the kubelet says so.
func memory(r *cri.LinuxContainerResources, host Host) (*specs.LinuxMemory, error) {
	limit, swap := r.GetMemoryLimitInBytes(), r.GetMemorySwapLimitInBytes()
	if limit < -1 || swap < -1 {
		return nil, invalid("memory limits must not be negative, except -1 for no limit")
	}
	if swap > 0 && limit <= 0 {
		return nil, invalid("memory_swap_limit_in_bytes %d includes memory and needs a memory_limit_in_bytes: set both, or -1 for memory and swap without a limit", swap)
	}
	if swap > 0 && swap < limit {
		return nil, invalid("memory_swap_limit_in_bytes %d includes memory and is less than memory_limit_in_bytes %d", swap, limit)
	}
	if swap == 0 {
		swap = limit
	}
	var out specs.LinuxMemory
	if limit != 0 {
		out.Limit = &limit
	}
	if swap != 0 && host.SwapAccounting {
		out.Swap = &swap
	}
	if out == (specs.LinuxMemory{}) {
		return nil, nil
	}
	return &out, nil
}

var pageSize = regexp.MustCompile(`^[1-9][0-9]{0,5}[KMG]B$`)

// hugepages leaves limits out if the node has no hugetlb controller: the
// kubelet sends a limit for each size to every container. A container cannot
// exceed a limit of 0 for a size that the node lacks, so that is left out as
// well.
func hugepages(r *cri.LinuxContainerResources, host Host) ([]specs.LinuxHugepageLimit, error) {
	var out []specs.LinuxHugepageLimit
	for _, l := range r.GetHugepageLimits() {
		if !pageSize.MatchString(l.GetPageSize()) {
			return nil, invalid("hugepage_limits: page size %.20q is not of the form 2MB", l.GetPageSize())
		}
		if !slices.Contains(host.HugePageSizes, l.GetPageSize()) {
			if l.GetLimit() != 0 {
				return nil, invalid("hugepage_limits: this node has no huge pages of %s; it has: %s",
					l.GetPageSize(), cmp.Or(strings.Join(host.HugePageSizes, ", "), "none"))
			}
			continue
		}
		if host.HugeTLB {
			out = append(out, specs.LinuxHugepageLimit{Pagesize: l.GetPageSize(), Limit: l.GetLimit()})
		}
	}
	return out, nil
}

var unifiedKey = regexp.MustCompile(`^[a-z0-9_]+(\.[A-Za-z0-9_-]+)+$`)

func unified(r *cri.LinuxContainerResources, host Host) (map[string]string, error) {
	if len(r.GetUnified()) == 0 {
		return nil, nil
	}
	if !host.CgroupV2 {
		return nil, invalid("unified resources require cgroup v2, but this node has v1")
	}
	out := map[string]string{}
	for key, value := range r.GetUnified() {
		if strings.HasPrefix(key, "cgroup.") { // cgroup.procs accepts any process of the node, cgroup.kill kills it
			return nil, invalid("unified resource %.80q is not a limit: the files cgroup.* belong to the runtime", key)
		}
		if !unifiedKey.MatchString(key) || len(value) > 4096 || strings.ContainsAny(value, "\n\x00") {
			return nil, invalid("unified resource %.80q is not the name and value of a cgroup v2 file", key)
		}
		out[key] = value
	}
	return out, nil
}

// Report returns base overlaid with those limits in r that CRI can express, for
// limits that no request has set. A nil r sets none.
func Report(base *cri.LinuxContainerResources, r *specs.LinuxResources) *cri.LinuxContainerResources {
	if r == nil {
		return base
	}
	out := &cri.LinuxContainerResources{}
	if base != nil {
		out = proto.CloneOf(base)
	}
	if c := r.CPU; c != nil {
		reportLimit(&out.CpuShares, c.Shares)
		reportLimit(&out.CpuPeriod, c.Period)
		reportLimit(&out.CpuQuota, c.Quota)
		out.CpusetCpus, out.CpusetMems = cmp.Or(c.Cpus, out.CpusetCpus), cmp.Or(c.Mems, out.CpusetMems)
	}
	if m := r.Memory; m != nil {
		reportLimit(&out.MemoryLimitInBytes, m.Limit)
		if noSwap := m.Limit != nil && m.Swap != nil && *m.Limit == *m.Swap; !noSwap || out.MemorySwapLimitInBytes != 0 {
			reportLimit(&out.MemorySwapLimitInBytes, m.Swap) // otherwise it follows the memory limit
		}
	}
	for _, limit := range r.HugepageLimits {
		out.HugepageLimits = slices.DeleteFunc(out.HugepageLimits, func(l *cri.HugepageLimit) bool { return l.GetPageSize() == limit.Pagesize })
		out.HugepageLimits = append(out.HugepageLimits, &cri.HugepageLimit{PageSize: limit.Pagesize, Limit: limit.Limit})
	}
	if len(r.Unified) > 0 && out.Unified == nil {
		out.Unified = map[string]string{}
	}
	maps.Copy(out.Unified, r.Unified)
	return out
}

func reportLimit[T int64 | uint64](to *int64, limit *T) {
	if limit != nil {
		*to = int64(*limit)
	}
}
