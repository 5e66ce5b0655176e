package monitor

import (
	"syscall"

	"github.com/crius-run/crius/conmon/wire"
)

// group is the container's own cgroup. What lives in it when the container's first process
// has ended is killed before the end is reported. In a PID namespace of the container's own
// the kernel does that; in the node's, the pod's or another container's nobody else would.
//
// A process that has left the cgroup, in every hierarchy, is not the container's any more.
type group struct {
	id     string // of the container; the names of its cgroups have it, and no other's
	table  string // /proc/PID/cgroup of the first process; empty: it has no cgroup of its own
	shared bool   // the PID namespace is not the container's own

	emptying bool // the first process has ended, others may be alive
	strikes  int
	until    int64 // uptime after which those that are alive are not waited for
	next     int64 // uptime of the next strike
}

// How many milliseconds killed processes are waited for, and how many at most if the
// server waits for the monitor's end.
const (
	dieTime     = 10_000
	releaseTime = 2_000
)

// watch notes where the processes of the container will be, whose first one is pid.
func (g *group) watch(id string, pid int, table []byte, helpers bool) {
	var own [4096]byte
	mine, err := wire.ReadFile(own[:], "/proc/self/cgroup")
	if err != nil || upTo(mine, id) > 0 || upTo(table, id) == 0 {
		return
	}
	// Beside a sandbox there are helpers of its runtime, which have other namespaces.
	g.id, g.table, g.shared = id, string(table), helpers || !firstOfNamespace(pid)
}

// firstOfNamespace reports whether a process is the first one of its PID namespace, which
// ends with it.
func firstOfNamespace(pid int) bool {
	const key = "\nNSpid:"
	var buf [4096]byte
	status, err := wire.ReadFile(buf[:], "/proc/", itoa(pid), "/status")
	at := index(status, key)
	if err != nil || at < 0 {
		return false
	}
	line, _, _ := wire.Cut(status[at+len(key):], '\n')
	for i := len(line) - 1; i >= 0; i-- {
		if line[i] == ' ' || line[i] == '\t' {
			return string(line[i+1:]) == "1"
		}
	}
	return false
}

// begin is called when the first process has ended.
func (g *group) begin() {
	if g.emptying = g.table != ""; g.emptying {
		g.until = uptime() + dieTime
		g.strike()
	}
}

// strike kills what there is, and waits the longer for the next time the more often that
// was not enough. From the second time on, where the kernel cannot kill a cgroup as a whole,
// it is frozen meanwhile: what forks faster than it is killed does not any more.
func (g *group) strike() {
	g.each((*hierarchy).kill)
	if !g.shared || !g.occupied() {
		g.emptying = false
		return
	}
	if g.strikes > 0 {
		g.each((*hierarchy).freeze)
	}
	if g.emptying = g.killEach() > 0; g.emptying {
		g.thaw()
	}
	const most = 7
	g.strikes++
	g.next = uptime() + 1<<min(g.strikes, most)>>1
}

// empty reports whether nothing of the container is alive or waited for any longer; it kills
// what is, when it is time for that.
func (g *group) empty(released bool) bool {
	now := uptime()
	if g.emptying && now >= g.next {
		g.strike()
	}
	until := g.until
	if released {
		until -= dieTime - releaseTime
	}
	return !g.emptying || now >= until
}

// left describes the processes that could not be killed; empty: there are none.
func (g *group) left() string {
	if !g.emptying {
		return ""
	}
	const most = 8
	text, n := "", 0
	g.members(func(pid int) {
		if n++; n <= most {
			text += " " + itoa(pid)
		}
	})
	if n > most {
		text += " and " + itoa(n-most) + " more"
	}
	if n == 0 {
		return ""
	}
	return "processes of the container are still alive after SIGKILL:" + text
}

// killEach kills all that are alive, in whatever hierarchy, and returns how many there were.
func (g *group) killEach() (alive int) {
	g.members(func(pid int) {
		alive++
		process, err := pidfdOpen(pid)
		if err != nil {
			return
		}
		if g.has(pid) { // and not another one that has got the number
			pidfdKill(process)
		}
		syscall.Close(process)
	})
	return alive
}

// thaw lets the killed die, whoever has frozen them, in the cgroup or below it.
func (g *group) thaw() {
	g.each((*hierarchy).thaw)
	g.members(func(pid int) {
		var buf [8192]byte
		if table, err := wire.ReadFile(buf[:], "/proc/", itoa(pid), "/cgroup"); err == nil {
			(&group{id: g.id, table: view(table)}).each((*hierarchy).thaw)
		}
	})
}

// members calls do for each process of the container that is alive. The cgroup itself does
// not list them all: those below it are in lists of their own, and a process may be
// in it in one hierarchy alone.
func (g *group) members(do func(pid int)) {
	pids, _ := numbersIn("/proc")
	self := syscall.Getpid()
	for _, pid := range pids {
		if pid != self && g.has(pid) {
			do(pid)
		}
	}
}

// has reports whether a process is the container's, and alive.
func (g *group) has(pid int) bool {
	var buf [8192]byte
	table, err := wire.ReadFile(buf[:], "/proc/", itoa(pid), "/cgroup")
	if err != nil || upTo(table, g.id) == 0 {
		return false
	}
	stat, err := wire.ReadFile(buf[:512], "/proc/", itoa(pid), "/stat")
	end := len(stat) - 1
	for end >= 0 && stat[end] != ')' {
		end--
	}
	return err == nil && end >= 0 && end+2 < len(stat) && stat[end+2] != 'Z' && stat[end+2] != 'X'
}

// occupied reports whether there may be anybody, at the price of a few small files.
func (g *group) occupied() (yes bool) {
	g.each(func(h *hierarchy) {
		var buf [256]byte
		for _, file := range [...]string{"/cgroup.procs", "/pids.current", "/cgroup.events"} {
			text, err := h.read(buf[:], file)
			switch {
			case err != nil || len(text) == 0:
			case file == "/cgroup.procs":
				yes = true
			case file == "/pids.current":
				yes = yes || string(text) != "0\n"
			default:
				n, known := keyed(text, "populated")
				yes = yes || n > 0 && known
			}
		}
	})
	return yes
}

// each calls do for each hierarchy in which the container has a cgroup of its own.
func (g *group) each(do func(*hierarchy)) {
	for table := []byte(g.table); len(table) > 0; {
		var line []byte
		line, table, _ = wire.Cut(table, '\n')
		_, rest, _ := wire.Cut(line, ':')
		names, path, ok := wire.Cut(rest, ':')
		own := upTo(path, g.id)
		if !ok || own == 0 {
			continue
		}
		h := hierarchy{path: view(path[:own]), inner: view(path[own:]), v2: len(names) == 0, freezer: listed(names, "freezer")}
		h.root = "/sys/fs/cgroup/" + string(names)
		if named := "name="; len(names) > len(named) && string(names[:len(named)]) == named {
			h.root = "/sys/fs/cgroup/" + string(names[len(named):])
		}
		if h.v2 {
			h.root = "/sys/fs/cgroup"
			if syscall.Access("/sys/fs/cgroup/unified/cgroup.procs", 0) == nil {
				h.root = "/sys/fs/cgroup/unified"
			}
		}
		do(&h)
	}
}

// upTo is the length of a path, or of text with paths, up to the first cgroup that has the
// container's name, to which those below it belong; 0: there is none. The name is the id, with
// a prefix that ends in "-", and a suffix that begins with "." where systemd has made it.
func upTo(path []byte, id string) int {
	for from := 0; ; {
		at := index(path[from:], id)
		if at < 0 {
			return 0
		}
		begin, end := from+at, from+at+len(id)
		whole := begin > 0 && (path[begin-1] == '/' || path[begin-1] == '-')
		if whole && (end == len(path) || path[end] == '/' || path[end] == '.' || path[end] == '\n') {
			for end < len(path) && path[end] != '/' && path[end] != '\n' {
				end++
			}
			return end
		}
		from = end
	}
}

// hierarchy is one in which the container has a cgroup of its own.
type hierarchy struct {
	root, path  string
	inner       string // below path, where the process is that this is about; empty: there
	v2, freezer bool
}

func (h *hierarchy) read(buf []byte, file string) ([]byte, error) {
	return wire.ReadFile(buf, h.root, h.path, file)
}

func (h *hierarchy) write(file, text string) bool {
	fd, err := wire.Open(syscall.O_WRONLY, 0, h.root, h.path, file)
	if err != nil {
		return false
	}
	_, err = syscall.Write(fd, []byte(text))
	syscall.Close(fd)
	return err == nil
}

// kill kills the cgroup as a whole, where the kernel can do that: on cgroup v2, since 5.14.
func (h *hierarchy) kill() {
	if h.v2 {
		h.write("/cgroup.kill", "1")
	}
}

// freeze waits for what is in the cgroup to stop, for a moment: what does not stop cannot
// fork either.
func (h *hierarchy) freeze() {
	const moment = 50
	if !h.freezer || !h.write("/freezer.state", "FROZEN") {
		return
	}
	for until := uptime() + moment; uptime() < until; giveWay() {
		var buf [64]byte
		if state, err := h.read(buf[:], "/freezer.state"); err != nil || string(state) == "FROZEN\n" {
			return
		}
	}
}

func (h *hierarchy) thaw() {
	if !h.freezer {
		return
	}
	for at := h.inner; ; at = wire.Parent(at) {
		if at == "/" || at == "." {
			at = ""
		}
		h.write(at+"/freezer.state", "THAWED")
		if at == "" {
			return
		}
	}
}

// index is where word begins in text; -1: nowhere.
func index(text []byte, word string) int {
	for i := 0; i+len(word) <= len(text); i++ {
		if string(text[i:i+len(word)]) == word {
			return i
		}
	}
	return -1
}
