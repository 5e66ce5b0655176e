package server

import (
	"slices"

	"github.com/crius-run/crius/internal/cgroup"
)

// podMetrics returns the cAdvisor metrics of pods and containers, by kind;
// those without a kind come with any. Names, help, types, labels and units are
// cAdvisor's, which test/cadvisor compares.
func podMetrics() []podMetric {
	return slices.Concat(generalMetrics(), cpuMetrics(), memoryMetrics(), diskMetrics(), diskIOMetrics(),
		networkMetrics(), socketMetrics(), processMetrics(), otherMetrics(), hugePageMetrics(), specMetrics())
}

func generalMetrics() []podMetric {
	return []podMetric{
		{name: "container_last_seen", help: "Last time a container was seen by the exporter", gauge: true,
			value: func(s *sample) *uint64 { return new(uint64(s.now.Unix())) }},
		{name: "container_start_time_seconds", help: "Start time of the container since unix epoch in seconds.", gauge: true,
			value: func(s *sample) *uint64 { return new(uint64(s.started.Unix())) }},
	}
}

func cpuMetrics() []podMetric {
	time := func(name, help string, field func(*cgroup.CPUDetails) *uint64) podMetric {
		return podMetric{kind: "cpu", name: name, help: help, duration: true, value: func(s *sample) *uint64 {
			if s.details.CPU == nil {
				return nil
			}
			return field(s.details.CPU)
		}}
	}
	// cAdvisor has metrics of the quota's effect only if there is one.
	quota := func(name, help string, field func(*cgroup.CPUDetails) *uint64) podMetric {
		return podMetric{kind: "cpu", name: name, help: help, value: func(s *sample) *uint64 {
			if s.details.CPU == nil || none(s.details.Limits.CPUQuota) {
				return nil
			}
			return field(s.details.CPU)
		}}
	}
	duration := func(m podMetric) podMetric {
		m.duration = true
		return m
	}
	burst := func(m podMetric) podMetric {
		m.unless = func(o cgroup.Offers) bool { return !o.CPUBurst }
		return m
	}
	return []podMetric{
		time("container_cpu_user_seconds_total", "Cumulative user cpu time consumed in seconds.",
			func(c *cgroup.CPUDetails) *uint64 { return c.User }),
		time("container_cpu_system_seconds_total", "Cumulative system cpu time consumed in seconds.",
			func(c *cgroup.CPUDetails) *uint64 { return c.System }),
		{kind: "cpu", name: "container_cpu_usage_seconds_total", help: "Cumulative cpu time consumed in seconds.", labels: []string{"cpu"}, duration: true,
			values: func(s *sample, add emit) {
				if s.details.CPU != nil {
					add(s.details.CPU.Total, "total")
				}
			}},
		quota("container_cpu_cfs_periods_total", "Number of elapsed enforcement period intervals.",
			func(c *cgroup.CPUDetails) *uint64 { return c.Periods }),
		quota("container_cpu_cfs_throttled_periods_total", "Number of throttled period intervals.",
			func(c *cgroup.CPUDetails) *uint64 { return c.ThrottledPeriods }),
		duration(quota("container_cpu_cfs_throttled_seconds_total", "Total time duration the container has been throttled.",
			func(c *cgroup.CPUDetails) *uint64 { return c.ThrottledTime })),
		burst(quota("container_cpu_cfs_burst_periods_total", "Number of periods when burst occurs.",
			func(c *cgroup.CPUDetails) *uint64 { return c.Bursts })),
		burst(duration(quota("container_cpu_cfs_burst_seconds_total", "Total time duration the container has been bursted.",
			func(c *cgroup.CPUDetails) *uint64 { return c.BurstTime }))),
	}
}

// none reports whether there is no limit, or no known one.
func none(limit *uint64) bool { return limit == nil || *limit == 0 }

func memoryMetrics() []podMetric {
	gauge := func(name, help string, field func(*cgroup.MemoryDetails) *uint64) podMetric {
		return podMetric{kind: "memory", name: name, help: help, gauge: true, value: func(s *sample) *uint64 {
			if s.details.Memory == nil {
				return nil
			}
			return field(s.details.Memory)
		}}
	}
	hits := gauge("container_memory_failcnt", "Number of memory usage hits limits",
		func(m *cgroup.MemoryDetails) *uint64 { return m.LimitHits })
	hits.gauge = false
	return []podMetric{
		gauge("container_memory_cache", "Number of bytes of page cache memory.",
			func(m *cgroup.MemoryDetails) *uint64 { return m.Cache }),
		gauge("container_memory_rss", "Size of RSS in bytes.",
			func(m *cgroup.MemoryDetails) *uint64 { return m.RSS }),
		gauge("container_memory_kernel_usage", "Size of kernel memory allocated in bytes.",
			func(m *cgroup.MemoryDetails) *uint64 { return m.Kernel }),
		gauge("container_memory_mapped_file", "Size of memory mapped files in bytes.",
			func(m *cgroup.MemoryDetails) *uint64 { return m.Mapped }),
		gauge("container_memory_swap", "Container swap usage in bytes.",
			func(m *cgroup.MemoryDetails) *uint64 { return m.Swap }),
		hits,
		gauge("container_memory_usage_bytes", "Current memory usage in bytes, including all memory regardless of when it was accessed",
			func(m *cgroup.MemoryDetails) *uint64 { return m.Usage }),
		gauge("container_memory_max_usage_bytes", "Maximum memory usage recorded in bytes",
			func(m *cgroup.MemoryDetails) *uint64 { return m.MaxUsage }),
		gauge("container_memory_working_set_bytes", "Current working set in bytes.",
			func(m *cgroup.MemoryDetails) *uint64 { return m.WorkingSet }),
		gauge("container_memory_total_active_file_bytes", "Current total active file in bytes.",
			func(m *cgroup.MemoryDetails) *uint64 { return m.ActiveFile }),
		gauge("container_memory_total_inactive_file_bytes", "Current total inactive file in bytes.",
			func(m *cgroup.MemoryDetails) *uint64 { return m.InactiveFile }),
		{kind: "memory", name: "container_memory_failures_total", help: "Cumulative count of memory allocation failures.",
			labels: []string{"failure_type", "scope"}, values: memoryFailures},
	}
}

func memoryFailures(s *sample, add emit) {
	m := s.details.Memory
	if m == nil {
		return
	}
	add(m.OwnFaults, "pgfault", "container")
	add(m.OwnMajorFaults, "pgmajfault", "container")
	add(m.Faults, "pgfault", "hierarchy")
	add(m.MajorFaults, "pgmajfault", "hierarchy")
}

func processMetrics() []podMetric {
	process := func(name, help string, value func(*cgroup.Processes) *uint64) podMetric {
		return podMetric{kind: "process", name: name, help: help, gauge: true, value: func(s *sample) *uint64 {
			if s.container == nil || s.container.Processes == nil {
				return nil
			}
			return value(s.container.Processes)
		}}
	}
	return []podMetric{
		process("container_processes", "Number of processes running inside the container.",
			func(p *cgroup.Processes) *uint64 { return &p.Count }),
		process("container_file_descriptors", "Number of open file descriptors for the container.",
			func(p *cgroup.Processes) *uint64 { return p.Files }),
		process("container_sockets", "Number of open sockets for the container.",
			func(p *cgroup.Processes) *uint64 { return p.Sockets }),
		{kind: "process", name: "container_threads_max", help: "Maximum number of threads allowed inside the container, infinity if value is zero", gauge: true,
			value: func(s *sample) *uint64 { return s.details.TaskLimit }},
		{kind: "process", name: "container_threads", help: "Number of threads running inside the container", gauge: true,
			value: func(s *sample) *uint64 { return s.details.Tasks }},
		{kind: "process", name: "container_ulimits_soft", help: "Soft ulimit values for the container root process. Unlimited if -1, except priority and nice",
			gauge: true, labels: []string{"ulimit"}, values: func(s *sample, add emit) {
				if s.container != nil && s.container.Processes != nil {
					add(s.container.Processes.FileLimit, "max_open_files")
				}
			}},
	}
}

func otherMetrics() []podMetric {
	stall := func(name, help string, total func(*cgroup.Details) *cgroup.Stall) podMetric {
		return podMetric{kind: "pressure", name: name, help: help, duration: true,
			unless: func(o cgroup.Offers) bool { return !o.Pressure },
			value: func(s *sample) *uint64 {
				if stall := total(s.details); stall != nil {
					return &stall.Total
				}
				return nil
			}}
	}
	some := func(p *cgroup.Pressure) *cgroup.Stall {
		if p == nil {
			return nil
		}
		return p.Some
	}
	full := func(p *cgroup.Pressure) *cgroup.Stall {
		if p == nil {
			return nil
		}
		return p.Full
	}
	return []podMetric{
		{kind: "oom", name: "container_oom_events_total", help: "Count of out of memory events observed for the container",
			value: func(s *sample) *uint64 { return s.details.OOMKills }},
		stall("container_pressure_cpu_stalled_seconds_total", "Total time duration no tasks in the container could make progress due to CPU congestion.",
			func(d *cgroup.Details) *cgroup.Stall { return full(d.CPUPressure) }),
		stall("container_pressure_cpu_waiting_seconds_total", "Total time duration tasks in the container have waited due to CPU congestion.",
			func(d *cgroup.Details) *cgroup.Stall { return some(d.CPUPressure) }),
		stall("container_pressure_memory_stalled_seconds_total", "Total time duration no tasks in the container could make progress due to memory congestion.",
			func(d *cgroup.Details) *cgroup.Stall { return full(d.MemoryPressure) }),
		stall("container_pressure_memory_waiting_seconds_total", "Total time duration tasks in the container have waited due to memory congestion.",
			func(d *cgroup.Details) *cgroup.Stall { return some(d.MemoryPressure) }),
		stall("container_pressure_io_stalled_seconds_total", "Total time duration no tasks in the container could make progress due to IO congestion.",
			func(d *cgroup.Details) *cgroup.Stall { return full(d.IOPressure) }),
		stall("container_pressure_io_waiting_seconds_total", "Total time duration tasks in the container have waited due to IO congestion.",
			func(d *cgroup.Details) *cgroup.Stall { return some(d.IOPressure) }),
	}
}

func hugePageMetrics() []podMetric {
	huge := func(name, help string, gauge bool, value func(cgroup.HugePages) *uint64) podMetric {
		return podMetric{kind: "hugetlb", name: name, help: help, gauge: gauge, labels: []string{"pagesize"},
			unless: func(o cgroup.Offers) bool { return !o.HugePages },
			values: func(s *sample, add emit) {
				for _, pages := range s.details.HugePages {
					add(value(pages), pages.Size)
				}
			}}
	}
	most := huge("container_hugetlb_max_usage_bytes", "Maximum hugepage usage recorded in bytes", true,
		func(p cgroup.HugePages) *uint64 { return p.MaxUsage })
	most.unless = func(o cgroup.Offers) bool { return !o.HugePageMax }
	return []podMetric{
		huge("container_hugetlb_failcnt", "Number of hugepage usage hits limits", false,
			func(p cgroup.HugePages) *uint64 { return p.LimitHits }),
		huge("container_hugetlb_usage_bytes", "Current hugepage usage in bytes", true,
			func(p cgroup.HugePages) *uint64 { return p.Usage }),
		most,
	}
}

func specMetrics() []podMetric {
	limit := func(name, help string, value func(cgroup.Limits) *uint64) podMetric {
		return podMetric{kind: "spec", name: name, help: help, gauge: true,
			value: func(s *sample) *uint64 { return value(s.details.Limits) }}
	}
	return []podMetric{
		limit("container_spec_cpu_period", "CPU period of the container.", func(l cgroup.Limits) *uint64 { return l.CPUPeriod }),
		limit("container_spec_cpu_quota", "CPU quota of the container.", func(l cgroup.Limits) *uint64 {
			if none(l.CPUQuota) {
				return nil
			}
			return l.CPUQuota
		}),
		{kind: "spec", name: "container_spec_cpu_shares", help: "CPU share of the container.", gauge: true, value: cpuShares},
		limit("container_spec_memory_limit_bytes", "Memory limit for the container.", func(l cgroup.Limits) *uint64 { return l.Memory }),
		limit("container_spec_memory_swap_limit_bytes", "Memory swap limit for the container.", func(l cgroup.Limits) *uint64 { return l.MemorySwap }),
		limit("container_spec_memory_reservation_limit_bytes", "Memory reservation limit for the container.",
			func(l cgroup.Limits) *uint64 { return l.MemoryReservation }),
	}
}

// cpuShares returns the CPU shares in force. If the kernel has only a weight, those of the request
// are exact: runtimes since runc 1.3.2 and crun 1.23 map shares to weights differently from earlier
// ones (google/cadvisor#3737).
func cpuShares(s *sample) *uint64 {
	limits := s.details.Limits
	if s.container == nil || !limits.SharesOfWeight {
		return limits.CPUShares
	}
	asked := s.container.View.Resources.GetLinux()
	if _, weighed := asked.GetUnified()["cpu.weight"]; asked.GetCpuShares() > 0 && !weighed {
		return new(uint64(asked.GetCpuShares()))
	}
	return limits.CPUShares
}
