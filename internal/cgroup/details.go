package cgroup

import (
	"bytes"
	"time"
)

// Parts selects what Details reads; each part is one file or a few.
type Parts uint

// The parts of Details.
const (
	CPUPart       Parts = 1 << iota // Details.CPU
	MemoryPart                      // Details.Memory
	IOPart                          // Details.IO
	TasksPart                       // Details.Tasks, TaskLimit
	HugePagesPart                   // Details.HugePages
	OOMPart                         // Details.OOMKills
	PressurePart                    // the three pressures
	LimitsPart                      // Details.Limits except CPUQuota
	QuotaPart                       // Details.Limits.CPUQuota and CPUPeriod
)

// Details is all that the kernel reports about the usage of the processes in a
// cgroup and below it. Values that it does not report are nil or empty.
type Details struct {
	CPU    *CPUDetails
	Memory *MemoryDetails
	IO     []DeviceIO // by device; devices that were never used are missing

	Tasks     *uint64 // processes with all their threads
	TaskLimit *uint64 // 0: none
	OOMKills  *uint64 // processes killed because memory ran out
	HugePages []HugePages
	Limits    Limits

	CPUPressure, MemoryPressure, IOPressure *Pressure
}

// CPUDetails are times in nanoseconds since the cgroup was made.
type CPUDetails struct {
	Total        *uint64
	User, System *uint64

	Periods, ThrottledPeriods, ThrottledTime *uint64 // of the CPU quota
	Bursts, BurstTime                        *uint64 // periods above the quota, and the time above it
}

// MemoryDetails are in bytes, except for the counts.
type MemoryDetails struct {
	Usage, MaxUsage           *uint64
	WorkingSet                *uint64 // as Memory.WorkingSet
	Cache, RSS, Mapped        *uint64
	ActiveFile, InactiveFile  *uint64
	Kernel, Swap              *uint64
	LimitHits                 *uint64 // how often usage hit the limit
	Faults, MajorFaults       *uint64 // of the cgroup and those below
	OwnFaults, OwnMajorFaults *uint64 // of the cgroup alone; v2 has only those above
}

// DeviceIO is the I/O of a block device.
type DeviceIO struct {
	Major, Minor uint64
	Operations   []Operation
}

// Operation is a kind of I/O: Read and Write, and in v1 also Sync, Async,
// Discard and Total.
type Operation struct {
	Name         string
	Bytes, Count *uint64
}

// HugePages is the use of huge pages of one size.
type HugePages struct {
	Size                       string  // as the kernel names its files: 2MB, 1GB
	Usage, MaxUsage, LimitHits *uint64 // bytes, bytes, count; v2 has no maximum
}

// Limits are those of this cgroup itself, in the units of v1: CPU times in
// microseconds, memory in bytes. 0 means none, and nil unknown.
type Limits struct {
	CPUShares, CPUPeriod, CPUQuota *uint64
	SharesOfWeight                 bool // CPUShares is an estimate: the kernel has a weight only

	Memory            *uint64
	MemorySwap        *uint64 // v1: of memory and swap together, v2: of swap
	MemoryReservation *uint64 // v1: soft limit, v2: memory.min
}

// Details reads parts of the cgroup's usage. A missing cgroup is not an error;
// after an error the remaining values are still valid.
func (m *Meter) Details(parts Parts) (Details, error) {
	r := m.readers.Get().(*reader)
	defer m.readers.Put(r)
	r.err = nil
	var d Details
	for _, of := range []struct {
		part Parts
		read func(*reader, *Details)
	}{
		{CPUPart, m.cpuDetails},
		{MemoryPart, m.memoryDetails},
		{IOPart, func(r *reader, d *Details) { d.IO = r.io(m.io) }},
		{TasksPart, m.taskDetails},
		{HugePagesPart, m.hugePages},
		{OOMPart, m.oomKills},
		{PressurePart, m.pressureDetails},
		{LimitsPart, m.limits},
		{QuotaPart, m.quota},
	} {
		if parts&of.part != 0 {
			of.read(r, &d)
		}
	}
	return d, r.err
}

func (m *Meter) cpuDetails(r *reader, d *Details) {
	cpu := &CPUDetails{}
	if m.cpu.v2 {
		r.counters(m.cpu, "cpu.stat", func(name []byte, n uint64) {
			switch string(name) {
			case "usage_usec":
				cpu.Total = new(1000 * n)
			case "user_usec":
				cpu.User = new(1000 * n)
			case "system_usec":
				cpu.System = new(1000 * n)
			case "throttled_usec":
				cpu.ThrottledTime = new(1000 * n)
			case "burst_usec":
				cpu.BurstTime = new(1000 * n)
			default:
				cpu.period(name, n)
			}
		})
	} else {
		cpu.Total = r.number(m.cpu, "cpuacct.usage")
		r.counters(m.cpu, "cpuacct.stat", func(name []byte, n uint64) {
			const tick = uint64(time.Second / 100) // USER_HZ, which is the same everywhere
			switch string(name) {
			case "user":
				cpu.User = new(tick * n)
			case "system":
				cpu.System = new(tick * n)
			}
		})
		r.counters(m.sched, "cpu.stat", func(name []byte, n uint64) {
			switch string(name) {
			case "throttled_time":
				cpu.ThrottledTime = new(n)
			case "burst_time":
				cpu.BurstTime = new(n)
			default:
				cpu.period(name, n)
			}
		})
	}
	if cpu.Total != nil {
		d.CPU = cpu
	}
}

// period reads the counters whose name is the same in both versions.
func (c *CPUDetails) period(name []byte, n uint64) {
	switch string(name) {
	case "nr_periods":
		c.Periods = new(n)
	case "nr_throttled":
		c.ThrottledPeriods = new(n)
	case "nr_bursts":
		c.Bursts = new(n)
	}
}

func (m *Meter) taskDetails(r *reader, d *Details) {
	d.Tasks = r.number(m.pids, "pids.current")
	d.TaskLimit = r.limit(m.pids, "pids.max")
}

func (m *Meter) oomKills(r *reader, d *Details) {
	file := "memory.oom_control"
	if m.memory.v2 {
		file = "memory.events"
	}
	r.counters(m.memory, file, func(name []byte, n uint64) {
		if string(name) == "oom_kill" {
			d.OOMKills = new(n)
		}
	})
}

func (m *Meter) pressureDetails(r *reader, d *Details) {
	if !m.pressure.v2 {
		return
	}
	d.CPUPressure = r.pressure(m.pressure, "cpu.pressure")
	if d.CPUPressure != nil {
		d.MemoryPressure = r.pressure(m.pressure, "memory.pressure")
		d.IOPressure = r.pressure(m.pressure, "io.pressure")
	}
}

func (m *Meter) hugePages(r *reader, d *Details) {
	for _, size := range m.sizes {
		usage, peak, hits := ".usage_in_bytes", ".max_usage_in_bytes", ".failcnt"
		if m.huge.v2 {
			usage, peak, hits = ".current", "", ".events"
		}
		prefix := "hugetlb." + size
		pages := HugePages{Size: size, Usage: r.number(m.huge, prefix+usage)}
		if pages.Usage == nil {
			continue
		}
		if m.huge.v2 {
			r.counters(m.huge, prefix+hits, func(name []byte, n uint64) {
				if string(name) == "max" {
					pages.LimitHits = new(n)
				}
			})
		} else {
			pages.MaxUsage = r.number(m.huge, prefix+peak)
			pages.LimitHits = r.number(m.huge, prefix+hits)
		}
		d.HugePages = append(d.HugePages, pages)
	}
}

func (m *Meter) limits(r *reader, d *Details) {
	l, at := &d.Limits, m.memory
	if at.v2 {
		l.Memory = r.limit(at, "memory.max")
		l.MemorySwap = r.limit(at, "memory.swap.max")
		l.MemoryReservation = r.limit(at, "memory.min")
	} else {
		l.Memory = r.limit(at, "memory.limit_in_bytes")
		l.MemorySwap = r.limit(at, "memory.memsw.limit_in_bytes")
		l.MemoryReservation = r.limit(at, "memory.soft_limit_in_bytes")
	}
	if !m.sched.v2 {
		l.CPUShares = r.number(m.sched, "cpu.shares")
	} else if weight := r.number(m.sched, "cpu.weight"); weight != nil {
		l.CPUShares, l.SharesOfWeight = new(sharesOf(*weight)), true
	}
}

// sharesOf returns the cpu.shares for a cpu.weight, by the linear mapping from
// 1..10000 to 2..262144 (KEP-2254) that cAdvisor uses as well. Newer runtimes map
// shares to weights in another way, of which the weight shows nothing.
func sharesOf(weight uint64) uint64 {
	weight = min(max(weight, 1), 10000)
	return 2 + (weight-1)*262142/9999
}

func (m *Meter) quota(r *reader, d *Details) {
	if !m.sched.v2 {
		d.Limits.CPUPeriod = r.number(m.sched, "cpu.cfs_period_us")
		d.Limits.CPUQuota = r.limit(m.sched, "cpu.cfs_quota_us")
		return
	}
	text, ok := r.text(m.sched, "cpu.max")
	if !ok {
		return
	}
	quota, period, _ := bytes.Cut(bytes.TrimSuffix(text, []byte("\n")), []byte(" "))
	n, err := number(period)
	if err != nil {
		r.fail(m.sched, "cpu.max", err)
		return
	}
	d.Limits.CPUPeriod = &n
	d.Limits.CPUQuota = r.parsedLimit(m.sched, "cpu.max", quota)
}

// limit returns the limit in a file, 0 if there is none, nil if it is unknown.
func (r *reader) limit(at place, name string) *uint64 {
	text, ok := r.text(at, name)
	if !ok {
		return nil
	}
	return r.parsedLimit(at, name, bytes.TrimSuffix(text, []byte("\n")))
}

func (r *reader) parsedLimit(at place, name string, text []byte) *uint64 {
	if s := string(text); s == "max" || s == "-1" {
		return new(uint64)
	}
	n, err := number(text)
	if err != nil {
		r.fail(at, name, err)
		return nil
	}
	if limited(&n) == nil {
		n = 0
	}
	return &n
}
