package scene

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/crius-run/crius/test/kit/wait"
)

// MiB is a mebibyte.
const MiB = 1 << 20

// A Knob is one limit under its names in both versions of cgroups.
type Knob struct{ Controller, V1, V2 string }

// The limits in CRI.
var (
	MemoryLimit = Knob{"memory", "memory.limit_in_bytes", "memory.max"}
	SwapLimit   = Knob{"memory", "memory.memsw.limit_in_bytes", "memory.swap.max"}
	CPUShares   = Knob{"cpu", "cpu.shares", "cpu.weight"}
	CPUQuota    = Knob{"cpu", "cpu.cfs_quota_us", "cpu.max"}
	CPUPeriod   = Knob{"cpu", "cpu.cfs_period_us", "cpu.max"}
	CPUs        = Knob{"cpuset", "cpuset.cpus", "cpuset.cpus"}
	Mems        = Knob{"cpuset", "cpuset.mems", "cpuset.mems"}
	HugePages   = Knob{"hugetlb", "hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.max"}
)

// Processes returns the processes whose cgroup has the container's id in its
// name.
func (c *Container) Processes(t *testing.T) []int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(data), c.Pod.World.CgroupParent()) && strings.Contains(string(data), c.ID) {
			pid, err := strconv.Atoi(strings.Split(file, "/")[2])
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, pid)
		}
	}
	return out
}

// Procfs reads a file of the node's /proc about the container's first process.
func (c *Container) Procfs(t *testing.T, file string) string {
	t.Helper()
	return Procfs(t, c.Processes(t), file)
}

// Procfs reads a file of the node's /proc about the first of a container's processes.
func Procfs(t *testing.T, pids []int, file string) string {
	t.Helper()
	if len(pids) == 0 {
		t.Fatal("the container has no process")
	}
	dir := fmt.Sprintf("/proc/%d/", pids[0])
	// A runtime's start may return before its init has become the program.
	wait.For(t, "the runtime's init to become the container's program", func() bool {
		name := Read(t, dir+"comm") // its exe does not help: runtimes run copies of themselves without a name
		return !strings.HasPrefix(name, "runc") && !strings.HasPrefix(name, "crun")
	})
	return strings.TrimSpace(Read(t, dir+file))
}

// CgroupDir returns the directory on the node of the container's cgroup in the
// hierarchy that has the controller.
func (c *Container) CgroupDir(t *testing.T, controller string) (dir string, v2 bool) {
	t.Helper()
	unified := ""
	for _, line := range strings.Split(c.Procfs(t, "cgroup"), "\n") {
		part := strings.SplitN(line, ":", 3)
		if slices.Contains(strings.Split(part[1], ","), controller) {
			return filepath.Join("/sys/fs/cgroup", part[1], part[2]), false
		}
		if part[1] == "" {
			unified = part[2]
		}
	}
	return filepath.Join("/sys/fs/cgroup", unified), true
}

// Kernel reads a limit from the kernel's file.
func (c *Container) Kernel(t *testing.T, k Knob) string {
	t.Helper()
	dir, v2 := c.CgroupDir(t, k.Controller)
	name := k.V1
	if v2 {
		name = k.V2
	}
	return strings.TrimSpace(Read(t, filepath.Join(dir, name)))
}

// Holds compares a limit with its value on version 1 or 2 of cgroups.
func (c *Container) Holds(t *testing.T, k Knob, v1, v2 string) {
	t.Helper()
	want := v1
	if _, unified := c.CgroupDir(t, k.Controller); unified {
		want = v2
	}
	Equal(t, k.V1, c.Kernel(t, k), want)
}
