package monitor

import (
	"slices"
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
	// Beside a runtime sandbox there are helpers of its runtime, which have other namespaces.
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
	if !g.shared {
		g.emptying = false
		return
	}
	if g.strikes > 0 && len(g.members()) > 0 {
		g.each((*hierarchy).freeze)
	}
	if g.emptying = g.killEach() > 0; g.emptying || g.strikes > 0 {
		g.each((*hierarchy).thaw)
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
	text, pids := "", g.members()
	for _, pid := range pids[:min(len(pids), most)] {
		text += " " + itoa(pid)
	}
	if more := len(pids) - most; more > 0 {
		text += " and " + itoa(more) + " more"
	}
	if len(pids) == 0 {
		return ""
	}
	return "processes of the container are still alive after SIGKILL:" + text
}

// killEach kills all that are alive, in whatever hierarchy, and returns how many there were.
func (g *group) killEach() (alive int) {
	pids := g.members()
	const most = 128 // of pidfds at a time
	for rest := pids; len(rest) > 0; rest = rest[min(len(rest), most):] {
		g.killListed(rest[:min(len(rest), most)])
	}
	return len(pids)
}

// killListed kills those that are still listed when a pidfd of each is open: another process
// may have got the number of one that has ended.
func (g *group) killListed(pids []int) {
	held := make([]int, len(pids))
	for i, pid := range pids {
		held[i], _ = pidfdOpen(pid)
	}
	listed := g.members()
	for i, process := range held {
		if _, found := slices.BinarySearch(listed, pids[i]); found {
			pidfdKill(process)
		}
		syscall.Close(process)
	}
}

// members are the processes of the container that are alive, ascending. The kernel lists them,
// also those whose main thread has ended, which /proc shows as zombies in the root, and those
// that /proc hides (hidepid). A process may be in the cgroup in one hierarchy alone.
func (g *group) members() (pids []int) {
	g.each(func(h *hierarchy) {
		h.walk(func(dir int) {
			pids = appendNumbers(pids, dir, "cgroup.procs")
		})
	})
	slices.Sort(pids)
	return slices.Compact(pids)
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
		h := hierarchy{path: view(path[:own]), v2: len(names) == 0, v1Freezer: listed(names, "freezer")}
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
	root, path    string
	v2, v1Freezer bool
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

// freezer is how a hierarchy freezes a cgroup.
type freezer struct {
	file, freeze, thaw string
	state, frozen      string // the file that tells, and what is in it then
}

// freezer is zero where the hierarchy cannot freeze the cgroup, or kills it as a whole.
func (h *hierarchy) freezer() (f freezer) {
	switch {
	case h.v1Freezer:
		f = freezer{"/freezer.state", "FROZEN", "THAWED", "/freezer.state", "FROZEN\n"}
	case h.v2 && syscall.Access(h.root+h.path+"/cgroup.kill", 0) == syscall.ENOENT: // before Linux 5.14
		f = freezer{"/cgroup.freeze", "1", "0", "/cgroup.events", "frozen 1\n"}
	}
	return f
}

// freeze waits for what is in the cgroup to stop, for a moment: what does not stop cannot
// fork either.
func (h *hierarchy) freeze() {
	const moment = 50
	f := h.freezer()
	if f.file == "" || !h.write(f.file, f.freeze) {
		return
	}
	for until := uptime() + moment; uptime() < until; giveWay() {
		var buf [64]byte
		if state, err := h.read(buf[:], f.state); err != nil || index(state, f.frozen) >= 0 {
			return
		}
	}
}

// thaw lets the killed die, whoever has frozen them, in the cgroup or below it.
func (h *hierarchy) thaw() {
	if f := h.freezer(); f.file != "" {
		h.walk(func(dir int) { writeAt(dir, f.file[1:], f.thaw) })
	}
}

// walk calls do with the directory of the cgroup, and of each below it.
func (h *hierarchy) walk(do func(dir int)) {
	if dir, err := wire.Open(syscall.O_RDONLY|syscall.O_DIRECTORY, 0, h.root, h.path); err == nil {
		walk(dir, do)
	}
}

// walk closes dir. It goes by directories, since paths may be longer than the kernel takes.
func walk(dir int, do func(dir int)) {
	do(dir)
	for _, name := range below(dir) {
		if child, err := openAt(dir, name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW); err == nil {
			walk(child, do)
		}
	}
	syscall.Close(dir)
}

// below are the names in a directory of cgroups; none if there are only files in it, which
// its link count says.
func below(dir int) (names []string) {
	var st syscall.Stat_t
	if err := syscall.Fstat(dir, &st); err == nil && st.Nlink == 2 {
		return nil
	}
	var buf [2048]byte
	for {
		n, err := syscall.ReadDirent(dir, buf[:])
		if err != nil || n <= 0 {
			return names
		}
		_, _, names = syscall.ParseDirent(buf[:n], -1, names)
	}
}

// appendNumbers appends those in the lines of a file.
func appendNumbers(numbers []int, dir int, name string) []int {
	fd, err := openAt(dir, name, syscall.O_RDONLY)
	if err != nil {
		return numbers
	}
	defer syscall.Close(fd)
	var buf [4096]byte
	number, inside := 0, false
	for {
		n, err := syscall.Read(fd, buf[:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return numbers
		}
		for _, c := range buf[:n] {
			if c >= '0' && c <= '9' {
				number, inside = 10*number+int(c-'0'), true
			} else if inside {
				numbers, number, inside = append(numbers, number), 0, false
			}
		}
	}
}

func openAt(dir int, name string, flags int) (int, error) {
	return syscall.Openat(dir, name, flags|syscall.O_CLOEXEC, 0)
}

func writeAt(dir int, name, text string) {
	if fd, err := openAt(dir, name, syscall.O_WRONLY); err == nil {
		_, _ = syscall.Write(fd, []byte(text))
		syscall.Close(fd)
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
