package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// oomCounter follows the kernel's own count of processes it has killed in the
// container's memory cgroup: no event is needed, so none can be missed. On
// cgroup v2 changes are followed as they happen all the same, because a
// systemd scope goes away with its last process, and its counter with it.
type oomCounter struct {
	fd    int // -1: unknown, counts nothing
	key   string
	first uint64 // the cgroup may be older than the container
	last  uint64
}

// watch opens the counter of the cgroup in which pid is. It never fails: a
// container whose OOM kills cannot be counted is a container all the same.
func (o *oomCounter) watch(pid int) {
	var buf [4096]byte
	table, err := wire.ReadFile(buf[:], "/proc/", itoa(pid), "/cgroup")
	if err != nil {
		return
	}
	var own [4096]byte
	if mine, err := wire.ReadFile(own[:], "/proc/self/cgroup"); err == nil && string(mine) == string(table) {
		return // a stand-in, which is where the monitors are
	}
	for _, file := range oomFiles(table) {
		if file.group != "" && o.open("oom_kill", file.root, file.group, file.name) {
			return
		}
	}
}

func (o *oomCounter) open(key string, path ...string) bool {
	fd, err := wire.Open(syscall.O_RDONLY, 0, path...)
	if err != nil {
		return false
	}
	o.fd, o.key = fd, key
	if !o.read() {
		syscall.Close(fd)
		o.fd = -1
		return false
	}
	o.first = o.last
	return true
}

// read brings the count up to date, if the cgroup still exists.
func (o *oomCounter) read() bool {
	if o.fd < 0 {
		return false
	}
	var buf [512]byte
	n, err := syscall.Pread(o.fd, buf[:], 0)
	if err != nil {
		return false
	}
	count, ok := keyed(buf[:n], o.key)
	if ok {
		o.last = count
	}
	return ok
}

func (o *oomCounter) kills() uint64 {
	o.read()
	return o.last - min(o.first, o.last)
}

func (m *monitor) countKills(int) { m.oom.read() }

// oomFile is where the counter of a cgroup may be.
type oomFile struct{ root, group, name string }

// oomFiles are the places to look, the likeliest first, for a process with this
// /proc/PID/cgroup, of which the result is a view. The memory controller is in
// one hierarchy only.
func oomFiles(table []byte) (files [3]oomFile) {
	const root = "/sys/fs/cgroup"
	for len(table) > 0 {
		var line []byte
		line, table, _ = wire.Cut(table, '\n')
		_, rest, _ := wire.Cut(line, ':')
		controllers, group, ok := wire.Cut(rest, ':')
		switch {
		case !ok:
		case len(controllers) == 0:
			files[1] = oomFile{root, view(group), "/memory.events"}
			files[2] = oomFile{root + "/unified", view(group), "/memory.events"}
		case listed(controllers, "memory"):
			files[0] = oomFile{root + "/memory", view(group), "/memory.oom_control"}
		}
	}
	return files
}

// listed reports whether a comma-separated list has the word.
func listed(list []byte, word string) bool {
	for more := true; more; {
		var item []byte
		if item, list, more = wire.Cut(list, ','); string(item) == word {
			return true
		}
	}
	return false
}

// keyed finds the number of a key in lines of "key number".
func keyed(text []byte, key string) (uint64, bool) {
	for len(text) > 0 {
		var line []byte
		line, text, _ = wire.Cut(text, '\n')
		if name, value, ok := wire.Cut(line, ' '); ok && string(name) == key {
			return wire.Number(value)
		}
	}
	return 0, false
}
