package cgroup

import (
	"bytes"
	"errors"
	"math"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// maxCounters is more than the size of any counter file: memory.stat has 2 KiB.
const maxCounters = 16 << 10

// reader reads the files of one cgroup for one Usage. After an error it
// continues, and remembers the first error.
type reader struct {
	err    error
	buffer [maxCounters]byte
}

// text returns the content of a file, valid until the next file is read. A file
// is missing if the kernel lacks the feature or the cgroup is gone; that is not
// an error.
func (r *reader) text(at place, name string) (text []byte, ok bool) {
	if at.dir == nil {
		return nil, false
	}
	text, err := r.slurp(at.dir, name)
	if err == nil {
		return text, true
	}
	if !gone(err) && !errors.Is(err, unix.EOPNOTSUPP) {
		r.fail(at, name, err)
	}
	return nil, false
}

// slurp reads once: the kernel generates the text of such a file as a whole,
// and returns it as a whole if the buffer is large enough.
func (r *reader) slurp(dir *directory, name string) ([]byte, error) {
	n, err := dir.read(name, r.buffer[:])
	if err == nil && n == len(r.buffer) {
		err = unix.EFBIG
	}
	return r.buffer[:n], err
}

func (r *reader) fail(at place, name string, err error) {
	if r.err == nil {
		r.err = &os.PathError{Op: "read counter", Path: at.dir.path + "/" + name, Err: err}
	}
}

// number returns the single number in a file; nil if there is none, and for
// "max".
func (r *reader) number(at place, name string) *uint64 {
	text, ok := r.text(at, name)
	if !ok || string(text) == "max\n" {
		return nil
	}
	n, err := number(bytes.TrimSuffix(text, []byte("\n")))
	if err != nil {
		r.fail(at, name, err)
		return nil
	}
	return &n
}

// counters calls visit for each "name number" line of a file.
func (r *reader) counters(at place, name string, visit func(name []byte, n uint64)) {
	text, ok := r.text(at, name)
	if !ok {
		return
	}
	if err := eachCounter(text, visit); err != nil {
		r.fail(at, name, err)
	}
}

func (r *reader) cpu(at place) *CPU {
	if !at.v2 {
		total := r.number(at, "cpuacct.usage")
		if total == nil {
			return nil
		}
		return &CPU{Total: *total}
	}
	var cpu *CPU
	r.counters(at, "cpu.stat", func(name []byte, n uint64) {
		if string(name) == "usage_usec" {
			cpu = &CPU{Total: 1000 * n}
		}
	})
	return cpu
}

// memoryFiles are the names of files and counters in one version of cgroups.
type memoryFiles struct {
	usage, limit                  string
	inactiveFile, rss             string // in memory.stat
	faults, majorFaults, swapUsed string // in memory.stat
}

func (r *reader) memory(at place) (*Memory, *Swap) {
	// v1 marks counters that include the cgroups below with total_.
	names := memoryFiles{"memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file", "total_rss", "total_pgfault", "total_pgmajfault", "total_swap"}
	if at.v2 {
		names = memoryFiles{"memory.current", "memory.max", "inactive_file", "anon", "pgfault", "pgmajfault", ""}
	}
	usage := r.number(at, names.usage)
	if usage == nil {
		return nil, nil
	}
	m := &Memory{Usage: *usage}
	var swap *Swap
	var limit, limitBoth *uint64 // of v1: the lowest limit of this cgroup and those above
	r.counters(at, "memory.stat", func(name []byte, n uint64) {
		switch string(name) {
		case names.inactiveFile:
			m.WorkingSet = new(*usage - min(*usage, n)) // n is read a moment later and may be larger
		case names.rss:
			m.RSS = new(n)
		case names.faults:
			m.Faults = new(n)
		case names.majorFaults:
			m.MajorFaults = new(n)
		case names.swapUsed:
			swap = &Swap{Usage: n}
		case "hierarchical_memory_limit":
			limit = limited(new(n))
		case "hierarchical_memsw_limit":
			limitBoth = limited(new(n))
		}
	})
	if at.v2 {
		m.Limit = r.number(at, names.limit)
		return m, r.swap(at)
	}
	if limit != nil { // otherwise it has none of its own either
		m.Limit = limited(r.number(at, names.limit))
	}
	if swap != nil && limitBoth != nil {
		swap.Limit = swapLimit(m.Limit, limited(r.number(at, "memory.memsw.limit_in_bytes")))
	}
	return m, swap
}

func (r *reader) swap(at place) *Swap {
	usage := r.number(at, "memory.swap.current")
	if usage == nil {
		return nil
	}
	return &Swap{Usage: *usage, Limit: r.number(at, "memory.swap.max")}
}

// limited treats v1's largest limit, which depends on the page size, as none.
func limited(limit *uint64) *uint64 {
	if limit == nil || *limit >= math.MaxInt64-(1<<20) {
		return nil
	}
	return limit
}

// swapLimit returns what v1's limit of memory and swap together leaves for
// swap.
func swapLimit(memory, both *uint64) *uint64 {
	if memory == nil || both == nil {
		return both
	}
	return new(*both - min(*both, *memory))
}

// pressures adds the pressures to u. Only v2 has them; on a hybrid node the
// cgroup may be missing there.
func (r *reader) pressures(at place, u *Usage) {
	if !at.v2 {
		return
	}
	cpu := r.pressure(at, "cpu.pressure")
	if cpu == nil {
		return
	}
	if u.CPU != nil {
		u.CPU.Pressure = cpu
	}
	if u.Memory != nil {
		u.Memory.Pressure = r.pressure(at, "memory.pressure")
	}
	u.IO = r.pressure(at, "io.pressure")
}

func (r *reader) pressure(at place, name string) *Pressure {
	text, ok := r.text(at, name)
	if !ok {
		return nil
	}
	p, err := parsePressure(text)
	if err != nil {
		r.fail(at, name, err)
	}
	return p
}

// eachCounter reads lines such as "pgfault 12". The name is valid only during
// the call.
func eachCounter(text []byte, visit func(name []byte, n uint64)) error {
	for line := range bytes.Lines(text) {
		name, value, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
		n, err := number(value)
		if err != nil {
			return err
		}
		visit(name, n)
	}
	return nil
}

// parsePressure reads a pressure file (Documentation/accounting/psi.rst), with
// lines such as "some avg10=0.12 avg60=0.03 avg300=0.00 total=4711":
// percentages, and a time in microseconds. It ignores other lines.
func parsePressure(text []byte) (*Pressure, error) {
	var all struct {
		Pressure
		some, full Stall
	}
	for line := range bytes.Lines(text) {
		kind, rest, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		var s Stall
		for len(rest) > 0 {
			var word []byte
			word, rest, _ = bytes.Cut(rest, []byte(" "))
			if !s.set(word) {
				return nil, problem{fault.Invalid, "cannot parse pressure counters: " + strconv.Quote(string(line[:min(len(line), 80)]))}
			}
		}
		switch string(kind) {
		case "some":
			all.some, all.Some = s, &all.some
		case "full":
			all.full, all.Full = s, &all.full
		}
	}
	return &all.Pressure, nil
}

// set reports whether word was understood.
func (s *Stall) set(word []byte) bool {
	name, value, _ := bytes.Cut(word, []byte("="))
	var err error
	switch string(name) {
	case "avg10":
		s.Avg10, err = strconv.ParseFloat(string(value), 64)
	case "avg60":
		s.Avg60, err = strconv.ParseFloat(string(value), 64)
	case "avg300":
		s.Avg300, err = strconv.ParseFloat(string(value), 64)
	case "total":
		s.Total, err = strconv.ParseUint(string(value), 10, 64)
		s.Total *= 1000
	}
	return err == nil
}

func number(text []byte) (uint64, error) {
	n, err := strconv.ParseUint(string(text), 10, 64)
	if err != nil {
		return 0, problem{fault.Invalid, "not a number: " + strconv.Quote(string(text[:min(len(text), 80)]))}
	}
	return n, nil
}
