package main_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

const mib = scene.MiB

// limited is a container's limits before an update.
func limited() *cri.LinuxContainerResources {
	return &cri.LinuxContainerResources{
		CpuPeriod: 100_000, CpuQuota: 50_000, CpuShares: 512,
		MemoryLimitInBytes: 64 * mib, MemorySwapLimitInBytes: 64 * mib,
		CpusetCpus: "0", CpusetMems: "0", OomScoreAdj: 500,
		HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 8 * mib}},
	}
}

func withResources(r *cri.LinuxContainerResources) scene.ContainerChange {
	return func(c *cri.ContainerConfig) { c.Linux.Resources = r }
}

func update(t *testing.T, c *scene.Container, r *cri.LinuxContainerResources) error {
	t.Helper()
	_, err := c.Pod.World.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{ContainerId: c.ID, Linux: r})
	return err
}

// inForce returns every limit from the kernel's files.
func inForce(t *testing.T, c *scene.Container) map[string]string {
	t.Helper()
	out := map[string]string{"oom_score_adj": c.Procfs(t, "oom_score_adj")}
	for _, k := range []scene.Knob{
		scene.MemoryLimit, scene.SwapLimit, scene.CPUShares, scene.CPUQuota, scene.CPUPeriod, scene.CPUs, scene.Mems, scene.HugePages,
	} {
		out[k.V1] = c.Kernel(t, k)
	}
	return out
}

// reported returns the limits in ContainerStatus.
func reported(t *testing.T, c *scene.Container) *cri.LinuxContainerResources {
	t.Helper()
	return c.Status(t).GetResources().GetLinux()
}

// unchanged runs f and checks that no limit has changed afterwards.
func unchanged(t *testing.T, c *scene.Container, what string, f func()) {
	t.Helper()
	kernel, said := inForce(t, c), reported(t, c)
	f()
	for limit, now := range inForce(t, c) {
		if now != kernel[limit] {
			t.Errorf("%s: %s was %s and is %s", what, limit, kernel[limit], now)
		}
	}
	if now := reported(t, c); !proto.Equal(said, now) {
		t.Errorf("%s: the status said %v and says %v", what, said, now)
	}
}

func TestUpdateChangesEveryLimit(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	scene.Each(t, func(t *testing.T, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep", withResources(limited()))
		want := &cri.LinuxContainerResources{
			CpuPeriod: 50_000, CpuQuota: 25_000, CpuShares: 1024,
			MemoryLimitInBytes: 96 * mib, MemorySwapLimitInBytes: 160 * mib,
			CpusetCpus: "0-1", CpusetMems: "0", OomScoreAdj: 700,
			HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 4 * mib}},
		}
		if err := update(t, c, want); err != nil {
			t.Fatal(err)
		}
		c.Holds(t, scene.CPUPeriod, "50000", "25000 50000")
		c.Holds(t, scene.CPUQuota, "25000", "25000 50000")
		c.Holds(t, scene.CPUShares, "1024", "39")
		c.Holds(t, scene.MemoryLimit, fmt.Sprint(96*mib), fmt.Sprint(96*mib))
		c.Holds(t, scene.SwapLimit, fmt.Sprint(160*mib), fmt.Sprint(64*mib))
		c.Holds(t, scene.CPUs, "0-1", "0-1")
		c.Holds(t, scene.HugePages, fmt.Sprint(4*mib), fmt.Sprint(4*mib))
		scene.Equal(t, "oom_score_adj", c.Procfs(t, "oom_score_adj"), "700")
		if got := reported(t, c); !proto.Equal(got, want) {
			t.Errorf("the status says %v, want %v", got, want)
		}
	})
}

// Memory and swap bound each other, so growing and shrinking need opposite
// orders of steps.
func TestUpdateMemoryAndSwapUpAndDown(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	scene.Each(t, func(t *testing.T, handler string) {
		c := w.Pod(t, handler).Start(t, "sleep", withResources(limited()))
		for _, limit := range []int64{128 * mib, 32 * mib, 256 * mib} {
			if err := update(t, c, &cri.LinuxContainerResources{MemoryLimitInBytes: limit, MemorySwapLimitInBytes: limit}); err != nil {
				t.Fatalf("both to %d: %v", limit, err)
			}
			c.Holds(t, scene.MemoryLimit, fmt.Sprint(limit), fmt.Sprint(limit))
			c.Holds(t, scene.SwapLimit, fmt.Sprint(limit), "0")
			scene.Equal(t, "memory in the status", reported(t, c).GetMemoryLimitInBytes(), limit)
		}
	})
}

// Limits that a request leaves out stay.
func TestUpdateOfOneLimitSparesTheOthers(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	c := w.Pod(t, "crun").Start(t, "sleep", withResources(limited()))
	before := inForce(t, c)
	if err := update(t, c, &cri.LinuxContainerResources{CpuShares: 256}); err != nil {
		t.Fatal(err)
	}
	after := inForce(t, c)
	c.Holds(t, scene.CPUShares, "256", "10")
	delete(before, scene.CPUShares.V1)
	delete(after, scene.CPUShares.V1)
	if !maps.Equal(before, after) {
		t.Errorf("the other limits were %v and are %v", before, after)
	}
	want := limited()
	want.CpuShares = 256
	if got := reported(t, c); !proto.Equal(got, want) {
		t.Errorf("the status says %v, want %v", got, want)
	}
	// An empty request changes nothing.
	unchanged(t, c, "empty", func() {
		if err := update(t, c, &cri.LinuxContainerResources{}); err != nil {
			t.Errorf("an empty request: %v", err)
		}
	})
}

// The score belongs to processes, and a container has several; those of an exec
// get the new one, too.
func TestUpdatedOOMScoreHoldsForEveryProcess(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	c := w.Pod(t, "crun").Start(t, "fork 2 sleep ; echo ready ; sleep", withResources(limited()))
	c.Says(t, "ready")
	for _, score := range []int64{800, 600} {
		if err := update(t, c, &cri.LinuxContainerResources{OomScoreAdj: score}); err != nil {
			t.Fatal(err)
		}
		for _, pid := range c.Processes(t) {
			got := strings.TrimSpace(scene.Read(t, fmt.Sprintf("/proc/%d/oom_score_adj", pid)))
			scene.Equal(t, fmt.Sprintf("oom_score_adj of process %d", pid), got, fmt.Sprint(score))
		}
		// runc first sets the score with which the container was created.
		got := ""
		if !wait.Until(t.Context(), func() bool {
			got = strings.TrimSpace(c.Exec(t, "sleep 500ms ; cat /proc/self/oom_score_adj"))
			return got == fmt.Sprint(score)
		}) {
			t.Errorf("oom_score_adj of an exec is %s, want %d", got, score)
		}
	}
}

// One impossible value among possible ones: nothing is changed.
func TestUpdateIsAllOrNothing(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	impossible := map[string]func(*cri.LinuxContainerResources){
		"a CPU that is not there":         func(r *cri.LinuxContainerResources) { r.CpusetCpus = "4000" },
		"no CPU list":                     func(r *cri.LinuxContainerResources) { r.CpusetCpus = "0;1" },
		"a memory node that is not there": func(r *cri.LinuxContainerResources) { r.CpusetMems = "63" },
		"a period beyond the kernel's":    func(r *cri.LinuxContainerResources) { r.CpuPeriod = 2_000_000 },
		"a quota below the kernel's":      func(r *cri.LinuxContainerResources) { r.CpuQuota = 10 },
		"swap below memory":               func(r *cri.LinuxContainerResources) { r.MemorySwapLimitInBytes = 16 * mib },
		"a score beyond the kernel's":     func(r *cri.LinuxContainerResources) { r.OomScoreAdj = 5000 },
		"pages of a size that is not there": func(r *cri.LinuxContainerResources) {
			r.HugepageLimits = []*cri.HugepageLimit{{PageSize: "3MB", Limit: 3 * mib}}
		},
		"a page size that leads out": func(r *cri.LinuxContainerResources) {
			r.HugepageLimits = []*cri.HugepageLimit{{PageSize: "/../../x", Limit: 1}}
		},
		"negative memory": func(r *cri.LinuxContainerResources) { r.MemoryLimitInBytes = -7 },
	}
	c := w.Pod(t, "crun").Start(t, "sleep", withResources(limited()))
	for name, spoil := range impossible {
		wish := &cri.LinuxContainerResources{
			CpuShares: 2048, CpuQuota: 70_000, MemoryLimitInBytes: 48 * mib, OomScoreAdj: 900,
			HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 2 * mib}},
		}
		spoil(wish)
		t.Run(name, func(t *testing.T) {
			unchanged(t, c, name, func() {
				scene.WantOneOf(t, update(t, c, wish), []codes.Code{codes.InvalidArgument, codes.FailedPrecondition})
			})
			if err := update(t, c, limited()); err != nil { // for the next one, in case this one failed
				t.Error(err)
			}
		})
	}
}

// A limit below the usage is refused, or the memory is reclaimed first: in both
// cases the container lives on, and nothing is half-done.
func TestUpdateMemoryBelowUse(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	c := w.Pod(t, "crun").Start(t, "alloc 40 ; sleep", withResources(limited()))
	c.Says(t, "allocated")
	wish := &cri.LinuxContainerResources{MemoryLimitInBytes: 16 * mib, MemorySwapLimitInBytes: 16 * mib, CpuShares: 2048}
	unchanged(t, c, "below use", func() {
		err := update(t, c, wish)
		scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.FailedPrecondition, codes.ResourceExhausted}, "memory")
	})
	scene.Equal(t, "state", c.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	if err := update(t, c, &cri.LinuxContainerResources{MemoryLimitInBytes: 60 * mib}); err != nil {
		t.Errorf("a limit above use after the refusal: %v", err)
	}
}

// Memory held only by the file cache does not count as in use.
func TestUpdateMemoryReclaimsTheFileCache(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{Disk: true})
	dir := w.Dir(t)
	if err := os.WriteFile(dir+"/big", make([]byte, 48*mib), 0o644); err != nil {
		t.Fatal(err)
	}
	c := w.Pod(t, "crun").Start(t, "sleep", withResources(limited()), mounted(&cri.Mount{ContainerPath: "/v", HostPath: dir}))
	c.Exec(t, "copy /v/big /v/copy") // the pages of the copy are charged to the container
	if err := update(t, c, &cri.LinuxContainerResources{MemoryLimitInBytes: 24 * mib, MemorySwapLimitInBytes: 24 * mib}); err != nil {
		t.Fatal(err)
	}
	c.Holds(t, scene.MemoryLimit, fmt.Sprint(24*mib), fmt.Sprint(24*mib))
}

// Keys of cgroup v2 cannot take effect on a node with v1.
func TestUpdateUnified(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	c := w.Pod(t, "crun").Start(t, "sleep", withResources(limited()))
	if _, v2 := c.CgroupDir(t, "memory"); v2 {
		if err := update(t, c, &cri.LinuxContainerResources{Unified: map[string]string{"memory.high": fmt.Sprint(48 * mib)}}); err != nil {
			t.Fatal(err)
		}
		c.Holds(t, scene.Knob{Controller: "memory", V2: "memory.high"}, "", fmt.Sprint(48*mib))
		return
	}
	unchanged(t, c, "unified", func() {
		err := update(t, c, &cri.LinuxContainerResources{CpuShares: 2048, Unified: map[string]string{"memory.high": "1000000"}})
		scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.FailedPrecondition}, "unified")
	})
	_, err := c.Pod.Try(t.Context(), "sleep", withResources(&cri.LinuxContainerResources{Unified: map[string]string{"memory.high": "1000000"}}))
	scene.WantOneOf(t, err, []codes.Code{codes.InvalidArgument, codes.FailedPrecondition}, "unified")
}

func TestUpdateInEveryState(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun")
	c := p.Create(t, "trap TERM", withResources(limited()))
	r := &cri.LinuxContainerResources{MemoryLimitInBytes: 96 * mib, MemorySwapLimitInBytes: 96 * mib, CpuShares: 1024, OomScoreAdj: 700}
	if err := update(t, c, r); err != nil {
		t.Fatalf("created: %v", err)
	}
	scene.Equal(t, "memory in the status of a created container", reported(t, c).GetMemoryLimitInBytes(), 96*mib)
	c.Start(t)
	c.Holds(t, scene.MemoryLimit, fmt.Sprint(96*mib), fmt.Sprint(96*mib))
	c.Holds(t, scene.CPUShares, "1024", "39")
	scene.Equal(t, "oom_score_adj", c.Procfs(t, "oom_score_adj"), "700")

	c.Stop(t, 0)
	last := reported(t, c)
	scene.WantCode(t, update(t, c, limited()), codes.FailedPrecondition, c.ID[:12])
	if now := reported(t, c); !proto.Equal(last, now) {
		t.Errorf("the status of an exited container said %v and says %v", last, now)
	}
	c.Remove(t)
	scene.WantCode(t, update(t, c, limited()), codes.NotFound, c.ID[:12])
	scene.WantCode(t, update(t, &scene.Container{Pod: p, ID: "nowhere"}, limited()), codes.NotFound, "nowhere")
	if err := update(t, &scene.Container{Pod: p}, limited()); status.Code(err) == codes.OK {
		t.Error("an update of no container was accepted")
	}
}

func TestUpdatesSurviveARestart(t *testing.T) {
	t.Parallel()
	w := scene.Private(t, node.Options{})
	pod := w.Pod(t, "crun")
	if err := updatePod(t, w, pod.ID, 345_678_000); err != nil {
		t.Fatal(err)
	}
	var all []*scene.Container
	for _, handler := range scene.Handlers {
		c := w.Pod(t, handler).Start(t, "sleep", withResources(limited()))
		if err := update(t, c, &cri.LinuxContainerResources{CpuQuota: 20_000, MemoryLimitInBytes: 40 * mib, OomScoreAdj: 750}); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	want := limited()
	want.CpuQuota, want.MemoryLimitInBytes, want.OomScoreAdj = 20_000, 40*mib, 750
	want.MemorySwapLimitInBytes = 40 * mib // follows
	for _, again := range []func(context.Context) error{w.Restart, w.Crash} {
		if err := again(t.Context()); err != nil {
			t.Fatal(err)
		}
		if told := info(t, pod); !strings.Contains(told, "345678000") {
			t.Errorf("the verbose status does not tell the pod's update: %s", told)
		}
		for _, c := range all {
			if got := reported(t, c); !proto.Equal(got, want) {
				t.Errorf("%s: the status says %v, want %v", c.Pod.Handler, got, want)
			}
			c.Holds(t, scene.MemoryLimit, fmt.Sprint(40*mib), fmt.Sprint(40*mib))
		}
	}
	for _, c := range all {
		if err := update(t, c, &cri.LinuxContainerResources{CpuShares: 256}); err != nil {
			t.Error(err)
		}
		c.Holds(t, scene.CPUQuota, "20000", "20000 100000")
	}
}
