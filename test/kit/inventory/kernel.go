package inventory

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/crius-run/crius/test/kit/wait"
)

func device(path string) uint64 {
	var st syscall.Stat_t
	_ = syscall.Lstat(path, &st) // zero if it is gone
	return st.Dev
}

// Processes returns the processes in one of the scope's cgroups or in its
// network namespace, or whose command line names its directory.
func Processes(s Scope) []int {
	var out []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err == nil && !slices.Contains(s.Ignore, pid) && s.holds(pid) {
			out = append(out, pid)
		}
	}
	return out
}

func (s Scope) holds(pid int) bool {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	if state, parent := stateAndParent(proc); state == "Z" && parent == "1" {
		return false // it has ended, and the machine's init is slow to reap it
	}
	if s.NetNS != 0 {
		var st syscall.Stat_t
		if syscall.Stat(filepath.Join(proc, "ns", "net"), &st) == nil && st.Ino == s.NetNS {
			return true
		}
	}
	if cgroups, _ := os.ReadFile(filepath.Join(proc, "cgroup")); s.Cgroup != "" {
		for line := range strings.Lines(string(cgroups)) {
			_, path, _ := strings.Cut(strings.TrimSpace(line), ":/")
			if strings.HasPrefix("/"+path+"/", s.Cgroup+"/") {
				return true
			}
		}
	}
	cmdline, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
	return s.Dir != "" && strings.Contains(string(cmdline), s.Dir+"/")
}

func stateAndParent(proc string) (state, parent string) {
	if f := statFields(proc); len(f) > 1 {
		return f[0], f[1]
	}
	return "", ""
}

// statFields returns the fields of /proc/PID/stat that follow the process's
// name, the third first; none if the process has ended.
func statFields(proc string) []string {
	stat, _ := os.ReadFile(filepath.Join(proc, "stat"))
	name := strings.LastIndex(string(stat), ")") // the name may contain anything
	return strings.Fields(string(stat[name+1:]))
}

// describe returns what identifies a process and its owner; alive is false if
// it has ended.
func describe(pid int) (what string, alive bool) {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	cgroups, _ := os.ReadFile(filepath.Join(proc, "cgroup"))
	_, cgroup, _ := strings.Cut(string(cgroups), ":/")
	cgroup, _, _ = strings.Cut(cgroup, "\n")
	what = fmt.Sprintf("%d %.300s in cgroup /%s", pid, commandLine(proc), cgroup)
	state, _ := stateAndParent(proc)
	return what, state != ""
}

// commandLine returns the name and state of a process that has no command line.
// A process in the middle of execve has none for a moment, for which
// commandLine waits; one that has unmapped its arguments, as the processes do
// in which gVisor runs a container's code, never has one again.
func commandLine(proc string) string {
	var args string
	wait.Until(context.Background(), func() bool {
		cmdline, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
		args = strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " "))
		return args != "" || !inExecve(proc)
	})
	if args != "" {
		return args
	}
	state, _ := stateAndParent(proc)
	name, _ := os.ReadFile(filepath.Join(proc, "comm"))
	return "[" + strings.TrimSpace(string(name)) + "] " + state
}

// inExecve reports whether the process has an executable and no arguments yet:
// the kernel maps them, and says where they end, late in execve. Kernel threads
// and zombies run no program.
func inExecve(proc string) bool {
	const argEnd = 49 // proc(5), counted from 1
	if _, err := os.Readlink(filepath.Join(proc, "exe")); err != nil {
		return false
	}
	fields := statFields(proc)
	return len(fields) > argEnd-3 && fields[argEnd-3] == "0"
}

// Cgroups returns the directories of the cgroup and everything below it in
// every hierarchy, parents before children.
func Cgroups(cgroup string) []string {
	if cgroup == "" {
		return nil
	}
	hierarchies, _ := filepath.Glob("/sys/fs/cgroup/*")
	var out []string
	for _, h := range append(hierarchies, "/sys/fs/cgroup") {
		_ = filepath.WalkDir(filepath.Join(h, cgroup), func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				out = append(out, path)
			}
			return nil
		})
	}
	return out
}

// Mounts returns the mounts below dir, and those whose source is below it.
func Mounts(dir string) ([]string, error) {
	if dir == "" {
		return nil, nil
	}
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.Lines(string(data)) {
		left, right, _ := strings.Cut(line, " - ")
		f, g := strings.Fields(left), strings.Fields(right)
		if len(f) < 5 || len(g) < 3 || f[4] == dir {
			continue
		}
		if !strings.HasPrefix(f[4], dir+"/") && !strings.Contains(right, dir+"/") {
			continue
		}
		out = append(out, fmt.Sprintf("%s %s root %s", g[0], f[4], f[3]))
	}
	return out, nil
}
