package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// accounting is a cgroup that contains all work of a target, so that the kernel
// adds up its CPU time.
type accounting struct{ dir, file string }

// newAccounting finds the cgroup on version 1, or 2, and makes it.
func newAccounting(path string) (accounting, error) {
	for _, mount := range []string{"/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpuacct"} {
		if _, err := os.Stat(filepath.Join(mount, "cpuacct.usage")); err == nil {
			dir := filepath.Join(mount, path)
			return accounting{dir, "cpuacct.usage"}, os.MkdirAll(dir, 0o755)
		}
	}
	dir := filepath.Join("/sys/fs/cgroup", path)
	return accounting{dir, "cpu.stat"}, os.MkdirAll(dir, 0o755)
}

// serverCgroup is the cgroup of the server, with its children unless they are
// moved elsewhere.
const serverCgroup = "server"

// enter moves a process into a child cgroup.
func (a accounting) enter(pid int) error {
	inner := filepath.Join(a.dir, serverCgroup) // version 2 allows processes only in leaves
	if err := os.MkdirAll(inner, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(inner, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
}

// seconds returns the CPU time of all processes that were ever in the cgroup.
func (a accounting) seconds() (float64, error) {
	text, err := os.ReadFile(filepath.Join(a.dir, a.file))
	if err != nil {
		return 0, err
	}
	unit := 1e9
	number := strings.TrimSpace(string(text))
	if usage, ok := strings.CutPrefix(number, "usage_usec "); ok {
		unit = 1e6
		number, _, _ = strings.Cut(usage, "\n")
	}
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("CPU time of %s: %w", a.dir, err)
	}
	return float64(n) / unit, nil
}
