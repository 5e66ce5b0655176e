package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// oomCounter follows the kernel's own count of processes it has killed in the
// container's memory cgroup: no event is needed, so none can be missed.
//
// A systemd scope goes away with its last process, and its counter with it. So on
// cgroup v2 changes are followed as they happen. Where the scope has gone first all the
// same, as on a busy node, the counter of the pod's cgroup is asked, which has the kills in
// all its containers and stays: what it has counted since both were read last may have been
// in this one. It is not followed, since it changes with each of the pod's containers that
// is at its limit.
type oomCounter struct {
	own counter
	pod counter // on cgroup v2; no others count what is below

	// seen is how many kills were noticed before the end, the last of them at the Unix time at.
	seen uint64
	at   int64
}

// watch opens the counters of the cgroup in which a process with this /proc/PID/cgroup is. It
// never fails: a container whose OOM kills cannot be counted is a container all the same.
func (o *oomCounter) watch(table []byte) {
	var own [4096]byte
	if mine, err := wire.ReadFile(own[:], "/proc/self/cgroup"); err == nil && string(mine) == string(table) {
		return // a stand-in, which is where the monitors are
	}
	for _, file := range oomFiles(table) {
		if file.group == "" || !o.own.open(oomKills, file.root, file.group, file.name) {
			continue
		}
		if file.name == eventsFile {
			o.pod.open(oomKills, file.root, above(file.group), file.name)
		}
		return
	}
}

// above is the cgroup above a container's. crun has its containers one below their
// systemd scopes.
func above(group string) string {
	const inner = ".scope/container"
	if at := len(group) - len(inner); at > 0 && group[at:] == inner {
		group = group[:at]
	}
	end := len(group)
	for end > 0 && group[end-1] != '/' {
		end--
	}
	return group[:end]
}

// read brings the counts up to date, if the container's cgroup still exists. The pod's
// is read first, so that nothing is in it that the container's does not have.
func (o *oomCounter) read() bool {
	pod, inPod := o.pod.look()
	own, exists := o.own.look()
	if !exists {
		return false
	}
	o.own.last = own
	if inPod {
		o.pod.last = pod
	}
	return true
}

// kills is how many processes have been killed in a container that ends with this code.
// If its cgroup has gone, unread, only a program that was killed itself can have been one
// of those that the pod counts.
func (o *oomCounter) kills(code int) uint64 {
	exists := o.read()
	kills := o.own.last - min(o.own.first, o.own.last)
	if pod, ok := o.pod.look(); ok && !exists && code == killed.Code {
		kills += pod - min(o.pod.last, pod)
	}
	return kills
}

// countKills also notes when the count has risen: people want to know. On cgroup v1 it is called by
// chance only.
func (m *monitor) countKills(int) {
	o := &m.oom
	o.read()
	if kills := o.own.last - min(o.own.first, o.own.last); kills > o.seen {
		o.seen = kills
		o.at, _ = now()
	}
}

// oomKills is the key of a counter among others in its file.
const oomKills = "oom_kill"

// counter is the kernel's count of OOM kills in a cgroup.
type counter struct {
	fd    int // -1: unknown, counts nothing
	key   string
	first uint64 // the cgroup may be older than the container
	last  uint64
}

func (c *counter) open(key string, path ...string) bool {
	fd, err := wire.Open(syscall.O_RDONLY, 0, path...)
	if err != nil {
		return false
	}
	c.fd, c.key = fd, key
	count, ok := c.look()
	if !ok {
		syscall.Close(fd)
		c.fd = -1
		return false
	}
	c.first, c.last = count, count
	return true
}

// look reads what the kernel has counted, if the cgroup still exists.
func (c *counter) look() (count uint64, ok bool) {
	if c.fd < 0 {
		return 0, false
	}
	var buf [512]byte
	n, err := syscall.Pread(c.fd, buf[:], 0)
	if err != nil {
		return 0, false
	}
	return keyed(buf[:n], c.key)
}

// eventsFile has the counter of cgroup v2, which has the kills in the cgroups below, too.
const eventsFile = "/memory.events"

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
			files[1] = oomFile{root, view(group), eventsFile}
			files[2] = oomFile{root + "/unified", view(group), eventsFile}
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
