package integration

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

const mib = 1 << 20

// A knob is one limit under its names in both versions of cgroups.
type knob struct{ controller, v1, v2 string }

var (
	memoryLimit = knob{"memory", "memory.limit_in_bytes", "memory.max"}
	cpuShares   = knob{"cpu", "cpu.shares", "cpu.weight"}
	cpuQuota    = knob{"cpu", "cpu.cfs_quota_us", "cpu.max"}
	cpuPeriod   = knob{"cpu", "cpu.cfs_period_us", "cpu.max"}
	cpus        = knob{"cpuset", "cpuset.cpus", "cpuset.cpus"}
	mems        = knob{"cpuset", "cpuset.mems", "cpuset.mems"}
)

// cgroupDir returns the directory on the node of a process's cgroup in the
// hierarchy that has the controller.
func cgroupDir(t *testing.T, f *facts.Facts, controller string) (dir string, v2 bool) {
	t.Helper()
	unified := ""
	for _, line := range f.Cgroups {
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

// cgroups returns those of the container's init, read from outside, because a
// container sees its own cgroup as the root.
func (c *container) cgroups(t *testing.T) *facts.Facts {
	t.Helper()
	for _, pid := range c.pod.w.processesOf(t, c.id) {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err == nil {
			return &facts.Facts{Cgroups: strings.Split(strings.TrimSpace(string(data)), "\n")}
		}
	}
	t.Fatal("no process of the container in any cgroup named after it")
	return nil
}

// processesOf returns the processes whose cgroup has the container's id in its
// name.
func (w *world) processesOf(t *testing.T, id string) []int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(data), w.CgroupParent()) && strings.Contains(string(data), id) {
			pid, err := strconv.Atoi(strings.Split(file, "/")[2])
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, pid)
		}
	}
	return out
}

// procfs reads a file of /proc about the container's first process.
func (c *container) procfs(t *testing.T, file string) string {
	t.Helper()
	return scene.Procfs(t, c.pod.w.processesOf(t, c.id), file)
}

// kernel reads a limit from the kernel's file.
func (c *container) kernel(t *testing.T, k knob) string {
	t.Helper()
	dir, v2 := cgroupDir(t, c.cgroups(t), k.controller)
	name := k.v1
	if v2 {
		name = k.v2
	}
	return strings.TrimSpace(read(t, filepath.Join(dir, name)))
}

func TestResourcesAreInForce(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{
				CpuPeriod: 50_000, CpuQuota: 25_000, CpuShares: 512,
				MemoryLimitInBytes: 64 * mib, CpusetCpus: "0", CpusetMems: "0", OomScoreAdj: 500,
			}
		})
		c.holds(t, memoryLimit, strconv.Itoa(64*mib), strconv.Itoa(64*mib))
		c.holds(t, cpuQuota, "25000", "25000 50000")
		c.holds(t, cpuPeriod, "50000", "25000 50000")
		c.holds(t, cpuShares, "512", "20")
		c.holds(t, cpus, "0", "0")
		c.holds(t, mems, "0", "0")
		equal(t, "oom_score_adj", c.procfs(t, "oom_score_adj"), "500")

		got := c.status(t).Resources.GetLinux()
		want := c.config.Linux.Resources
		equal(t, "memory limit in the status", got.GetMemoryLimitInBytes(), want.MemoryLimitInBytes)
		equal(t, "CPU quota in the status", got.GetCpuQuota(), want.CpuQuota)
		equal(t, "CPU period in the status", got.GetCpuPeriod(), want.CpuPeriod)
		equal(t, "CPU shares in the status", got.GetCpuShares(), want.CpuShares)
		equal(t, "CPU set in the status", got.GetCpusetCpus(), want.CpusetCpus)
	})
}

// A quota can be lifted, which crun 1.8.1 fails to write with cgroup v1, and set again.
// The runtime itself needs memory while it creates a container. A limit below that is named, and a
// container of that name can be created with another one.
func TestMemoryLimitIsTooSmall_moby_41167(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		limited := func(bytes int64) containerChange {
			return func(c *cri.ContainerConfig) {
				c.Metadata.Name = "limited"
				c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: bytes}
			}
		}
		if _, err := p.try(t.Context(), steps("sleep"), limited(64<<10)); err == nil || !strings.Contains(err.Error(), "memory limit") {
			t.Errorf("64 KiB: %v", err)
		}
		p.start(t, "sleep", limited(64*mib))
	})
}

func TestQuotaIsLifted(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{CpuPeriod: 50_000, CpuQuota: 25_000, CpuShares: 512, MemoryLimitInBytes: 64 * mib}
		})
		update := func(quota, shares int64) {
			t.Helper()
			_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
				ContainerId: c.id, Linux: &cri.LinuxContainerResources{CpuQuota: quota, CpuShares: shares},
			})
			must(t, err)
			equal(t, "CPU quota in the status", c.status(t).Resources.GetLinux().GetCpuQuota(), quota)
			c.holds(t, memoryLimit, strconv.Itoa(64*mib), strconv.Itoa(64*mib))
			c.holds(t, cpuPeriod, "50000", c.kernel(t, cpuQuota))
		}
		update(-1, 1024)
		c.holds(t, cpuQuota, "-1", "max 50000")
		c.holds(t, cpuShares, "1024", "39")
		update(-1, 512)
		c.holds(t, cpuQuota, "-1", "max 50000")
		c.holds(t, cpuShares, "512", "20")
		update(30_000, 512)
		c.holds(t, cpuQuota, "30000", "30000 50000")
		update(-1, 512)
		c.holds(t, cpuQuota, "-1", "max 50000")
	})
}

// An update of memory alone takes the limit of memory and swap together along, up and down.
// CPU shares beyond the kernel's bounds are reported as they are in force.
func TestSwapFollowsMemory(t *testing.T) {
	t.Parallel()
	w := shared(t)
	swap := knob{"memory", "memory.memsw.limit_in_bytes", "memory.swap.max"}
	each(t, func(t *testing.T, handler string) {
		c := w.run(t, handler).start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 64 * mib, MemorySwapLimitInBytes: 64 * mib, CpuShares: 1}
		})
		equal(t, "CPU shares at first", c.status(t).Resources.GetLinux().GetCpuShares(), 2)
		for _, limit := range []int64{128 * mib, 48 * mib} {
			_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
				ContainerId: c.id, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: limit, CpuShares: 1 << 40},
			})
			must(t, err)
			c.holds(t, memoryLimit, strconv.FormatInt(limit, 10), strconv.FormatInt(limit, 10))
			c.holds(t, swap, strconv.FormatInt(limit, 10), "0")
			c.holds(t, cpuShares, "262144", "10000")
			got := c.status(t).Resources.GetLinux()
			equal(t, "limit with swap in the status", got.GetMemorySwapLimitInBytes(), limit)
			equal(t, "CPU shares in the status", got.GetCpuShares(), 262144)
		}
	})
}

// holds compares a limit with its value on version 1 or 2 of cgroups.
func (c *container) holds(t *testing.T, k knob, v1, v2 string) {
	t.Helper()
	want := v1
	if _, unified := cgroupDir(t, c.cgroups(t), k.controller); unified {
		want = v2
	}
	equal(t, k.v1, c.kernel(t, k), want)
}

// The limit of memory and swap includes memory: the kernel refuses it without a limit of memory, and
// so does crius, with the reason and before anything has been changed.
func TestSwapLimitNeedsAMemoryLimit(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		swap := &cri.LinuxContainerResources{MemorySwapLimitInBytes: 64 * mib}
		_, err := p.try(t.Context(), []string{"sleep"}, func(c *cri.ContainerConfig) { c.Linux.Resources = swap })
		wantCode(t, err, codes.InvalidArgument, "memory_swap_limit_in_bytes 67108864", "memory_limit_in_bytes")
		c := p.start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.Resources = nil })
		update := func(r *cri.LinuxContainerResources) error {
			_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: c.id, Linux: r})
			return err
		}
		wantCode(t, update(swap), codes.InvalidArgument, "memory_swap_limit_in_bytes 67108864", "memory_limit_in_bytes")
		must(t, update(&cri.LinuxContainerResources{MemoryLimitInBytes: 32 * mib, MemorySwapLimitInBytes: 48 * mib}))
		must(t, update(swap)) // with the memory limit in force
		c.holds(t, memoryLimit, strconv.Itoa(32*mib), strconv.Itoa(32*mib))
		equal(t, "swap in the status", c.status(t).Resources.GetLinux().GetMemorySwapLimitInBytes(), int64(64*mib))
	})
}

func TestCgroupParentOfThePod_CVE_2025_47291(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, handler string) { shared(t).runsBelowParent(t, handler, nil) })
	t.Run("user namespace", func(t *testing.T) {
		ids := []*cri.IDMapping{{HostId: 1 << 20, Length: 1 << 16}}
		fixed(t).runsBelowParent(t, "runc", &cri.UserNamespace{Mode: cri.NamespaceMode_POD, Uids: ids, Gids: ids})
	})
}

// runsBelowParent checks that a container is in the cgroup that the kubelet has
// made for its pod.
func (w *world) runsBelowParent(t *testing.T, handler string, users *cri.UserNamespace) {
	t.Helper()
	parent := w.CgroupParent() + "/burstable/pod" + handler
	// The parent belongs to the kubelet, which removes it when the pod is gone.
	t.Cleanup(func() {
		for _, dir := range inventory.Cgroups(parent) {
			os.Remove(dir)
			os.Remove(filepath.Dir(dir))
		}
	})
	p := w.run(t, handler, func(c *cri.PodSandboxConfig) {
		c.Linux.CgroupParent, c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = parent, users
	})
	c := p.start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users })
	for _, line := range c.cgroups(t).Cgroups {
		part := strings.SplitN(line, ":", 3)
		if !strings.HasPrefix(part[2], parent+"/") && part[1] != "" {
			t.Errorf("hierarchy %q: the container is in %s, not below %s", part[1], part[2], parent)
		}
	}
}

// If the server may not lower the score, the container runs with the server's
// own value instead of failing.
func TestOOMScoreBelowWhatTheServerMay(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		f := w.run(t, handler).facts(t, func(c *cri.ContainerConfig) { c.Linux.Resources.OomScoreAdj = -998 })
		if f.OOMScore > 0 {
			t.Errorf("oom_score_adj is %d", f.OOMScore)
		}
	})
}

// crun lets a command inherit its own score, which is the server's until the
// server has set the container's. A process that the command forks before that
// also has the container's score soon after.
func TestOOMScoreOfWhatACommandForksAtOnce(t *testing.T) {
	t.Parallel()
	crun, err := exec.LookPath("crun")
	must(t, err)
	hasty := filepath.Join(t.TempDir(), "hasty-crun")
	// It undoes what the server has done, as if it had been faster, and returns
	// when the command has forked.
	scene.WriteProgram(t, hasty, []byte(`#!/bin/sh
for a; do [ "$a" != exec ] || { sleep .3; echo 0 >/proc/$$/oom_score_adj; `+crun+` "$@"; sleep .3; exit; }; done
exec `+crun+` "$@"
`))
	w := private(t, node.Options{Config: "[runtime.handlers.hasty]\npath = \"" + hasty + "\"\n"})
	c := w.run(t, "hasty").start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.Resources.OomScoreAdj = 500 })
	equal(t, "oom_score_adj of the container", c.procfs(t, "oom_score_adj"), "500")
	ctx, leave := context.WithCancel(t.Context())
	var calls sync.WaitGroup
	calls.Go(func() {
		_, _ = w.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "fork", "2", "sleep", ";", "sleep"}})
	})
	c.only(t, 4)
	wait.For(t, "all processes of the container to have its score", func() bool {
		return !slices.ContainsFunc(w.processesOf(t, c.id), func(pid int) bool {
			score, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
			return err == nil && strings.TrimSpace(string(score)) != "500" // the runtime itself has exited
		})
	})
	leave()
	calls.Wait()
}
