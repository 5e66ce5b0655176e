package cgroup

import (
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Usage is the usage of the processes in a cgroup and below it, by the kernel's
// own counters. A value is nil if the kernel does not report it, because it
// lacks a controller or pressure accounting.
type Usage struct {
	Time   time.Time // of the reading
	CPU    *CPU
	Memory *Memory
	Swap   *Swap
	IO     *Pressure
	Tasks  *uint64 // processes with all their threads, as the pids limit counts them
}

// CPU is time spent computing, of all CPUs together.
type CPU struct {
	Total    uint64  // nanoseconds since the cgroup was made
	Rate     *uint64 // nanoseconds per second, recently; see Meter.Read
	Pressure *Pressure
}

// Memory is in bytes, page faults are counts.
type Memory struct {
	Usage       uint64
	WorkingSet  *uint64 // Usage without file pages that have not been used recently, as the kubelet computes it
	Limit       *uint64 // nil: none
	RSS         *uint64 // anonymous memory, transparent huge pages included
	Faults      *uint64 // all page faults, as the kernel's pgfault
	MajorFaults *uint64 // faults that waited for the disk
	Pressure    *Pressure
}

// Swap is in bytes.
type Swap struct {
	Usage uint64
	Limit *uint64 // nil: none
}

// Pressure is how much tasks had to wait for a resource (PSI): some of them, or
// all at the same time.
type Pressure struct{ Some, Full *Stall }

// Stall is the share of time that was lost waiting.
type Stall struct {
	Avg10, Avg60, Avg300 float64 // percent, over that many seconds
	Total                uint64  // nanoseconds since the cgroup was made
}

// Meters makes meters. It has looked up once where the hierarchies are mounted.
type Meters struct {
	all     []hierarchy
	most    int           // see directory
	left    *atomic.Int32 // see directory
	sizes   []string      // of huge pages
	readers *sync.Pool    // of *reader, whose buffers are large
}

// NewMeters looks up where the hierarchies are mounted.
func NewMeters() (*Meters, error) {
	all, _, err := find()
	if err != nil {
		return nil, failed("find cgroups", "/proc/self/cgroup", err)
	}
	ms := newMeters(all)
	ms.sizes = HugePageSizes(os.DirFS("/"))
	return ms, nil
}

func newMeters(all []hierarchy) *Meters {
	return &Meters{all: all, most: spareDescriptors(), readers: &sync.Pool{New: func() any { return new(reader) }}}
}

// OfPod returns the Meters of one pod, for its own cgroup and its containers.
// Together they keep few descriptors open, however many containers there are;
// other meters keep none.
func (ms *Meters) OfPod() *Meters {
	of := *ms
	of.left = new(atomic.Int32)
	of.left.Store(keptOfPod)
	return &of
}

// Meter reads the usage of one cgroup repeatedly. Several goroutines may use it
// at once. A pod's meter keeps directories of the cgroup open from the first
// reading until Close.
type Meter struct {
	readers                     *sync.Pool
	directories                 []*directory // all of them
	cpu, memory, pids, pressure place
	sched, io, huge             place
	sizes                       []string // of huge pages

	mu   sync.Mutex // guards the fields below; held while one file is read
	rate rate
}

// place is the directory of a cgroup in the hierarchy that has a controller;
// nil if there is none.
type place struct {
	dir *directory
	v2  bool
}

// Of returns a meter of the cgroup path, which need not exist yet.
func (ms *Meters) Of(cgroup string) (*Meter, error) {
	cgroup, err := clean(cgroup)
	if err != nil {
		return nil, failed("measure cgroup", cgroup, err)
	}
	m := &Meter{readers: ms.readers, sizes: ms.sizes}
	for controller, at := range map[string]*place{
		"cpuacct": &m.cpu, "memory": &m.memory, "pids": &m.pids, "": &m.pressure,
		"cpu": &m.sched, "blkio": &m.io, "hugetlb": &m.huge,
	} {
		if h, ok := ms.hierarchy(controller); ok {
			*at = place{m.directory(h.dir(cgroup), ms.most), h.v2()}
			if h.v2() || controller == "memory" { // a reading reads several files of these
				at.dir.left = ms.left
			}
		}
	}
	return m, nil
}

// hierarchy prefers v1, where a controller is in its own hierarchy or in none.
// The v2 hierarchy reports CPU time and pressure without any controller.
func (ms *Meters) hierarchy(controller string) (of hierarchy, ok bool) {
	for _, h := range ms.all {
		switch {
		case h.has(controller) && !h.v2():
			return h, true
		case h.v2():
			of, ok = h, true
		}
	}
	return of, ok
}

// directory returns the directory for path, which several controllers may
// share.
func (m *Meter) directory(path string, most int) *directory {
	for _, d := range m.directories {
		if d.path == path {
			return d
		}
	}
	d := &directory{path: path, most: most}
	m.directories = append(m.directories, d)
	return d
}

// Close releases what is kept open. The meter may still be read.
func (m *Meter) Close() {
	for _, d := range m.directories {
		d.close()
	}
}

// Read returns the current usage of the cgroup. A missing cgroup is not an
// error: all fields are nil. After an error (a file that cannot be read or
// parsed), the remaining values are still valid.
//
// CPU.Rate is the mean since an earlier reading, at least rateWindow ago; it is
// nil until there is one. A reader in between gets the same value again, so
// that several readers do not spoil each other's values.
func (m *Meter) Read() (Usage, error) {
	r := m.readers.Get().(*reader)
	defer m.readers.Put(r)
	r.err = nil
	u := m.readCPU(r)
	u.Memory, u.Swap = r.memory(m.memory)
	u.Tasks = r.number(m.pids, "pids.current")
	r.pressures(m.pressure, &u)
	return u, r.err
}

// readCPU reads under the lock, so that readings are compared in order.
func (m *Meter) readCPU(r *reader) Usage {
	m.mu.Lock()
	defer m.mu.Unlock()
	u := Usage{Time: time.Now(), CPU: r.cpu(m.cpu)}
	if u.CPU != nil {
		u.CPU.Rate = m.rate.next(u.Time, u.CPU.Total)
	}
	return u
}

// rateWindow is the shortest time over which a rate is averaged.
const rateWindow = time.Second

// rate derives a rate from a counter.
type rate struct {
	at    time.Time // of the reading with which the next one is compared
	total uint64
	value *uint64 // latest, per second
}

func (r *rate) next(at time.Time, total uint64) *uint64 {
	since := at.Sub(r.at)
	switch {
	case r.at.IsZero() || total < r.total: // the first reading, or a new cgroup of the same name
		*r = rate{at: at, total: total}
	case since >= rateWindow:
		value := float64(total-r.total) / since.Seconds()
		*r = rate{at: at, total: total, value: new(uint64(value))}
	}
	return r.value
}

// Add adds the usage of another cgroup, which is neither above nor below this
// one. A value unknown for either is unknown in the sum; so is every kind of
// pressure, which cannot be added.
func (u *Usage) Add(o Usage) {
	if u.Time.Before(o.Time) {
		u.Time = o.Time
	}
	u.IO = nil
	u.Tasks = plus(u.Tasks, o.Tasks)
	if u.CPU != nil && o.CPU != nil {
		u.CPU = &CPU{Total: u.CPU.Total + o.CPU.Total, Rate: plus(u.CPU.Rate, o.CPU.Rate)}
	} else {
		u.CPU = nil
	}
	if u.Swap != nil && o.Swap != nil {
		u.Swap = &Swap{Usage: u.Swap.Usage + o.Swap.Usage, Limit: plus(u.Swap.Limit, o.Swap.Limit)}
	} else {
		u.Swap = nil
	}
	if u.Memory == nil || o.Memory == nil {
		u.Memory = nil
		return
	}
	u.Memory = &Memory{
		Usage:       u.Memory.Usage + o.Memory.Usage,
		WorkingSet:  plus(u.Memory.WorkingSet, o.Memory.WorkingSet),
		Limit:       plus(u.Memory.Limit, o.Memory.Limit),
		RSS:         plus(u.Memory.RSS, o.Memory.RSS),
		Faults:      plus(u.Memory.Faults, o.Memory.Faults),
		MajorFaults: plus(u.Memory.MajorFaults, o.Memory.MajorFaults),
	}
}

func plus(a, b *uint64) *uint64 {
	if a == nil || b == nil {
		return nil
	}
	return new(*a + *b)
}

// Gone reports whether there was nothing to read.
func (u Usage) Gone() bool {
	return u.CPU == nil && u.Memory == nil && u.Tasks == nil && u.IO == nil
}
