package cgroup

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Processes is what is known of the processes in a cgroup and below it, without
// their threads. Files and Sockets are open descriptors; they are nil where
// counting them would take too long.
type Processes struct {
	Count          uint64
	Files, Sockets *uint64
	// FileLimit is how many descriptors the process asked for may have open, its
	// soft limit; nil if it is not among them, or has none.
	FileLimit *uint64
}

const (
	// maxProcesses is of how many processes the descriptors are counted.
	maxProcesses = 1024
	// maxFiles is how many descriptors are looked at to find the sockets, a
	// microsecond each.
	maxFiles = 4096
)

// Processes counts the cgroup's processes and their descriptors, and looks up
// the limits of the one whose id is init. It is nil if the cgroup is gone. The
// caller is not counted: on v1 it is listed wherever a thread of its own is, as
// Start has one for a moment.
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
			if err != nil || pid == 0 || pid == self { // 0 is of another process namespace
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
// there are no more than most. A process that has ended has none.
func descriptors(pid int, most uint64) (files, sockets uint64) {
	dir, err := os.Open("/proc/" + strconv.Itoa(pid) + "/fd")
	if err != nil {
		return 0, 0
	}
	defer dir.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err == nil && uint64(st.Size) > most { // how many there are, since Linux 6.2
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

// fileLimit is the soft limit of open files in /proc/PID/limits, in a line such
// as "Max open files            1024                 4096                 files".
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
