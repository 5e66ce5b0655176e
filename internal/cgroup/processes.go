package cgroup

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Processes describes the processes in a cgroup and below it, without their
// threads. Files and Sockets are open descriptors; they are nil if counting
// them would take too long.
type Processes struct {
	Count          uint64
	Files, Sockets *uint64
	// FileLimit is the soft limit of open descriptors of the init process; nil if
	// that is not among the processes, or has no limit.
	FileLimit *uint64
}

const (
	// maxProcesses is the maximum number of processes whose descriptors are
	// counted.
	maxProcesses = 1024
	// maxFiles is the maximum number of descriptors that are checked for sockets,
	// at a microsecond each.
	maxFiles = 4096
)

// Processes counts the cgroup's processes and their descriptors, and looks up
// the limits of the one with pid init. It returns nil if the cgroup is gone. It
// does not count the caller: on v1 the caller is listed wherever it has a
// thread, as Start does for a moment.
func (m *Meter) Processes(init int) (*Processes, error) {
	at := m.pids
	if at.dir == nil {
		return nil, nil
	}
	var p *Processes
	var files, sockets uint64
	self := os.Getpid()
	err := walk(at.dir.path, nil, func(_ int, _ string, dir int) error {
		if p == nil {
			p = &Processes{}
		}
		list, err := read(dir, "cgroup.procs")
		if gone(err) || errors.Is(err, unix.EOPNOTSUPP) { // removed meanwhile, or threaded
			return nil
		}
		if err != nil {
			return err
		}
		for line := range strings.Lines(list) {
			pid, err := strconv.Atoi(strings.TrimSuffix(line, "\n"))
			if err != nil || pid == 0 || pid == self { // 0 belongs to another PID namespace
				continue
			}
			if pid == init {
				p.FileLimit = fileLimit(pid)
			}
			if p.Count++; p.Count <= maxProcesses {
				f, s := descriptors(pid, maxFiles-min(files, maxFiles))
				files, sockets = files+f, sockets+s
			}
		}
		return nil
	})
	if p == nil || err != nil {
		return nil, err
	}
	if p.Count <= maxProcesses {
		p.Files = &files
		if files <= maxFiles {
			p.Sockets = &sockets
		}
	}
	return p, nil
}

// descriptors counts a process's descriptors, and the sockets among them if
// there are no more than most. An ended process has none.
func descriptors(pid int, most uint64) (files, sockets uint64) {
	dir, err := os.Open("/proc/" + strconv.Itoa(pid) + "/fd")
	if err != nil {
		return 0, 0
	}
	defer dir.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err == nil && uint64(st.Size) > most { // the number of entries, since Linux 6.2
		return uint64(st.Size), 0
	}
	target := make([]byte, len("socket:"))
	for {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			if files++; files > most {
				continue
			}
			n, err := unix.Readlinkat(int(dir.Fd()), name, target)
			if err == nil && string(target[:n]) == "socket:" {
				sockets++
			}
		}
		if err != nil {
			return files, sockets
		}
	}
}

// fileLimit returns the soft limit of open files in /proc/PID/limits, from a
// line such as "Max open files 1024 4096 files".
func fileLimit(pid int) *uint64 {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/limits")
	if err != nil {
		return nil
	}
	_, rest, found := bytes.Cut(text, []byte("Max open files"))
	words := bytes.Fields(rest)
	if !found || len(words) == 0 {
		return nil
	}
	n, err := number(words[0])
	if err != nil { // unlimited
		return nil
	}
	return &n
}
