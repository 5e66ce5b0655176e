package inventory

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Load is what a running server holds in the kernel.
type Load struct {
	FDs     map[string]int // by kind: socket, pipe, pidfd, a path with its ids replaced
	Threads int
	RSSKiB  int
}

// Total returns the number of open file descriptors.
func (l Load) Total() int {
	n := 0
	for _, count := range l.FDs {
		n += count
	}
	return n
}

var varying = regexp.MustCompile(`:\[[0-9]+\]|[0-9a-f]{64}|[0-9]{4,}`)

// Server measures a process.
func Server(pid int) (Load, error) {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	entries, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return Load{}, err
	}
	l := Load{FDs: map[string]int{}}
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(proc, "fd", e.Name()))
		if err == nil {
			l.FDs[varying.ReplaceAllString(to, "")]++
		}
	}
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		return Load{}, err
	}
	for line := range strings.Lines(string(status)) {
		k, v, _ := strings.Cut(line, ":")
		f := strings.Fields(v)
		switch k {
		case "Threads":
			l.Threads, err = strconv.Atoi(f[0])
		case "VmRSS":
			l.RSSKiB, err = strconv.Atoi(f[0])
		}
		if err != nil {
			return Load{}, fmt.Errorf("status of process %d: %w", pid, err)
		}
	}
	return l, nil
}
