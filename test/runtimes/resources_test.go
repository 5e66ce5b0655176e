package runtimes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// A container's usage is reported, whatever counts it; and the pod's is not
// less.
func TestStats(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Start(t, "alloc 30 ; burn")
		p.Start(t, "sleep")
		var s *cri.ContainerStats
		told := wait.Until(t.Context(), func() bool {
			resp, err := w.Runtime().ContainerStats(t.Context(), &cri.ContainerStatsRequest{ContainerId: c.ID})
			if err != nil {
				t.Fatal(err)
			}
			s = resp.Stats
			return s.GetCpu().GetUsageCoreNanoSeconds().GetValue() > 1e8 && s.GetMemory().GetWorkingSetBytes().GetValue() > 30*scene.MiB
		})
		if !told {
			t.Errorf("what the container uses is not told: %v", s)
		}
		resp, err := w.Runtime().PodSandboxStats(t.Context(), &cri.PodSandboxStatsRequest{PodSandboxId: p.ID})
		if err != nil {
			t.Fatal(err)
		}
		pod := resp.Stats.Linux
		if pod.GetMemory().GetUsageBytes().GetValue() < 30*scene.MiB || pod.GetCpu().GetUsageCoreNanoSeconds().GetValue() < 1e8 ||
			len(pod.GetContainers()) != 2 || pod.GetNetwork().GetDefaultInterface().GetName() != "eth0" {
			t.Errorf("what the pod uses: %v", pod)
		}
	})
}

func TestUpdate(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 200 * scene.MiB}
			c.Linux.Overhead = &cri.LinuxContainerResources{MemoryLimitInBytes: 50 * scene.MiB}
		})
		c := p.Start(t, "sleep")
		_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
			ContainerId: c.ID, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: 77 * scene.MiB, CpuShares: 99},
		})
		if err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "limit", c.Status(t).Resources.Linux.MemoryLimitInBytes, int64(77*scene.MiB))
		if !sandboxed(handler) {
			c.Holds(t, scene.MemoryLimit, fmt.Sprint(77*scene.MiB), fmt.Sprint(77*scene.MiB))
			return
		}
		want := func(limit int) string {
			if !limited(handler) { // then its containers' limits are its size
				return none
			}
			return fmt.Sprint(limit * scene.MiB)
		}
		scene.Equal(t, "limit of the sandbox", memoryLimit(t, p), want(250))
		_, err = w.Runtime().UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{
			PodSandboxId: p.ID, Resources: &cri.LinuxContainerResources{MemoryLimitInBytes: 300 * scene.MiB},
		})
		if err != nil {
			t.Fatal(err)
		}
		scene.Equal(t, "limit of the sandbox after an update", memoryLimit(t, p), want(350))
	})
}

// inner is where gVisor's shim has the sandbox, below the cgroup of the pod's own container.
func inner(p *scene.Pod) string {
	parent := p.World.CgroupParent()
	if p.Handler == ofRunsc && strings.Contains(parent+p.Config.Linux.CgroupParent, "/pod") {
		return "/pod"
	}
	return ""
}

// none is the limit of what has none.
const none = "none"

// memoryLimit returns the limit of the pod's own container.
func memoryLimit(t *testing.T, p *scene.Pod) string {
	t.Helper()
	for _, file := range []string{"memory/*/memory.limit_in_bytes", "*/memory.max"} {
		pattern := filepath.Join("/sys/fs/cgroup", strings.Replace(file, "*", p.World.CgroupParent()+"/*"+p.ID+inner(p), 1))
		if found, _ := filepath.Glob(pattern); len(found) == 1 {
			limit := strings.TrimSpace(scene.Read(t, found[0]))
			if limit == "max" || len(limit) >= len("9223372036854771712") { // the highest of cgroup v1
				return none
			}
			return limit
		}
	}
	t.Fatal("the pod's own container has no memory limit anywhere")
	return ""
}

// A process that uses too much memory is reported as OOM. In gVisor that
// applies to every process.
func TestOutOfMemory(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		limit := &cri.LinuxContainerResources{MemoryLimitInBytes: 150 * scene.MiB}
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.Resources = limit })
		other := p.Start(t, "sleep")
		created := p.Create(t, "sleep")
		c := p.Start(t, "alloc 400 ; sleep", func(c *cri.ContainerConfig) { c.Linux.Resources = limit })
		dead := []*scene.Container{c}
		if limited(handler) {
			dead = append(dead, other)
		}
		if handler == gvisor { // its shim reports no end of what never ran
			dead = append(dead, created)
		}
		for i, c := range dead {
			if s := c.Wait(t); s.ExitCode != 137 || s.Reason != "OOMKilled" {
				t.Errorf("container %d ended with code %d, %s %s", i, s.ExitCode, s.Reason, s.Message)
			}
		}
		want := cri.PodSandboxState_SANDBOX_READY
		if limited(handler) {
			want = cri.PodSandboxState_SANDBOX_NOTREADY
		}
		wait.For(t, fmt.Sprint("the pod to be ", want), func() bool { return p.Status(t).State == want })
	})
}

func TestFilesOfTheRuntimeGo(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		p := w.Pod(t, handler)
		c := p.Start(t, "sleep")
		p.Stop(t)
		p.Remove(t)
		dir := filepath.Join(w.RunRoot(), "runtime", handler)
		if handler == ofRunsc {
			dir = "/run/containerd/runsc/k8s.io" // unless its configuration says something else
		}
		books, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range books {
			if strings.Contains(entry.Name(), c.ID) || strings.Contains(entry.Name(), p.ID) {
				t.Errorf("%s is left", entry.Name())
			}
		}
	})
}

// TestResizeBeforeThePodsCgroup: kubelets since 1.36 send the new limits of a
// pod before they change those of its cgroup, and treat an error as a refusal.
// Cgroup v1 has no CPU quota above the parent's.
func TestResizeBeforeThePodsCgroup(t *testing.T) {
	each(t, func(t *testing.T, w *scene.World, handler string) {
		parent := w.CgroupParent() + "/resize-" + handler
		t.Cleanup(func() { // it is the kubelet's
			for _, dir := range inventory.Cgroups(parent) {
				_ = os.Remove(dir)
			}
		})
		resize := func(quota int64) {
			t.Helper()
			err := cgroup.WriteFile(parent, "cpu.cfs_quota_us", fmt.Sprint(quota))
			if errors.Is(err, fault.NotFound) {
				err = cgroup.WriteFile(parent, "cpu.max", fmt.Sprint(quota))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := cgroup.Make(parent); err != nil {
			t.Fatal(err)
		}
		resize(50000)
		quota := func(n int64) *cri.LinuxContainerResources {
			return &cri.LinuxContainerResources{CpuPeriod: 100000, CpuQuota: n}
		}
		p := w.Pod(t, handler, func(c *cri.PodSandboxConfig) { c.Linux.CgroupParent, c.Linux.Resources = parent, quota(50000) })
		c := p.Start(t, "sleep", func(c *cri.ContainerConfig) { c.Linux.Resources = quota(50000) })
		updatePod := func(n int64) {
			t.Helper()
			if _, err := w.Runtime().UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: p.ID, Resources: quota(n)}); err != nil {
				t.Fatalf("UpdatePodSandboxResources to %d: %v", n, err)
			}
		}
		updateContainer := func(n int64) {
			t.Helper()
			if _, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: c.ID, Linux: quota(n)}); err != nil {
				t.Fatalf("UpdateContainerResources to %d: %v", n, err)
			}
		}
		updatePod(80000) // up: pod, its cgroup, container
		resize(80000)
		updateContainer(80000)
		if limited(handler) {
			scene.Equal(t, "quota of the sandbox", cpuQuota(t, p, parent), "80000")
		}
		updateContainer(40000) // down: container, pod, its cgroup
		updatePod(40000)
		resize(40000)
		if limited(handler) {
			scene.Equal(t, "quota of the sandbox afterwards", cpuQuota(t, p, parent), "40000")
		}
	})
}

// cpuQuota returns the quota of the pod's own container, below parent.
func cpuQuota(t *testing.T, p *scene.Pod, parent string) string {
	t.Helper()
	for _, file := range []string{"cpu,cpuacct/*/cpu.cfs_quota_us", "cpu/*/cpu.cfs_quota_us", "*/cpu.max"} {
		if found, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", strings.Replace(file, "*", parent+"/*"+p.ID+inner(p), 1))); len(found) == 1 {
			quota, _, _ := strings.Cut(strings.TrimSpace(scene.Read(t, found[0])), " ")
			return quota
		}
	}
	t.Fatal("the pod's own container has no CPU quota anywhere")
	return ""
}
