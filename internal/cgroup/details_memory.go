package cgroup

func (m *Meter) memoryDetails(r *reader, d *Details) {
	at, mem := m.memory, &MemoryDetails{}
	if at.v2 {
		mem.Usage = r.number(at, "memory.current")
		mem.MaxUsage = r.number(at, "memory.peak")
		mem.Swap = r.number(at, "memory.swap.current")
		r.counters(at, "memory.events", func(name []byte, n uint64) {
			if string(name) == "max" {
				mem.LimitHits = new(n)
			}
		})
	} else {
		mem.Usage = r.number(at, "memory.usage_in_bytes")
		mem.MaxUsage = r.number(at, "memory.max_usage_in_bytes")
		mem.Kernel = r.number(at, "memory.kmem.usage_in_bytes")
		mem.LimitHits = r.number(at, "memory.failcnt")
	}
	if mem.Usage == nil {
		return
	}
	into := mem.v1
	if at.v2 {
		into = mem.v2
	}
	r.counters(at, "memory.stat", func(name []byte, n uint64) {
		if field := into(name); field != nil {
			*field = new(n)
		}
	})
	if at.v2 { // a container has no cgroups below, unless it makes some
		mem.OwnFaults, mem.OwnMajorFaults = mem.Faults, mem.MajorFaults
	}
	if mem.InactiveFile != nil {
		mem.WorkingSet = new(*mem.Usage - min(*mem.Usage, *mem.InactiveFile))
	}
	d.Memory = mem
}

// v1 returns where a line of memory.stat belongs; nil: nowhere.
func (m *MemoryDetails) v1(name []byte) **uint64 {
	switch string(name) {
	case "total_cache":
		return &m.Cache
	case "total_rss":
		return &m.RSS
	case "total_mapped_file":
		return &m.Mapped
	case "total_active_file":
		return &m.ActiveFile
	case "total_inactive_file":
		return &m.InactiveFile
	case "total_swap":
		return &m.Swap
	case "total_pgfault":
		return &m.Faults
	case "total_pgmajfault":
		return &m.MajorFaults
	case "pgfault":
		return &m.OwnFaults
	case "pgmajfault":
		return &m.OwnMajorFaults
	}
	return nil
}

func (m *MemoryDetails) v2(name []byte) **uint64 {
	switch string(name) {
	case "file":
		return &m.Cache
	case "anon":
		return &m.RSS
	case "file_mapped":
		return &m.Mapped
	case "active_file":
		return &m.ActiveFile
	case "inactive_file":
		return &m.InactiveFile
	case "kernel":
		return &m.Kernel
	case "pgfault":
		return &m.Faults
	case "pgmajfault":
		return &m.MajorFaults
	}
	return nil
}
