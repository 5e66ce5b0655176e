package pod

import (
	"context"
	"errors"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/test/kit/wait"
)

// A runtime whose pods live in sandboxes first gets a container for the pod itself, with the
// pod's limits; all others are in its sandbox, even for the next server, and even if the
// runtime has been replaced by then.
func TestSandboxedPod(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.node.set(func() { b.node.sandbox = true })
	e := b.engine()
	cfg := podConfig("a")
	cfg.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 100 << 20}
	cfg.Linux.Overhead = &cri.LinuxContainerResources{MemoryLimitInBytes: 20 << 20}
	pod, err := e.RunSandbox(t.Context(), "", cfg)
	if err != nil {
		t.Fatal(err)
	}
	infra := b.task(pod)
	if infra.sandbox != "" || limitOf(infra.spec.Linux.Resources) != 120<<20 {
		t.Errorf("the pod's own container is in %q, with a limit of %d", infra.sandbox, limitOf(infra.spec.Linux.Resources))
	}
	first := b.start(e, pod, "one")
	if task := b.task(first); task.sandbox != pod || task.spec.Annotations["io.kubernetes.cri.sandbox-id"] != pod {
		t.Errorf("a container is in %q, says %v", task.sandbox, task.spec.Annotations)
	}
	other := containerConfig("two")
	other.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_TARGET, TargetId: first}
	if _, err := e.CreateContainer(t.Context(), pod, other, nil); !errors.Is(err, fault.Unimplemented) {
		t.Errorf("the processes of one container: %v", err)
	}

	err = e.UpdateSandboxResources(t.Context(), pod, nil, &cri.LinuxContainerResources{MemoryLimitInBytes: 200 << 20})
	if err != nil || len(infra.updates) != 1 || limitOf(infra.updates[0].Resources) != 220<<20 || limitOf(infra.updates[0].Old) != 120<<20 {
		t.Errorf("update: %v, %+v", err, infra.updates)
	}
	b.node.set(func() { b.node.fail["update"] = fault.Precondition })
	err = e.UpdateSandboxResources(t.Context(), pod, nil, &cri.LinuxContainerResources{MemoryLimitInBytes: 1 << 20})
	if !errors.Is(err, fault.Precondition) {
		t.Errorf("a limit that cannot be: %v", err)
	}
	if v, err := e.Sandbox(pod); err != nil || v.Config.Linux.Resources.MemoryLimitInBytes != 200<<20 {
		t.Errorf("%v, %v", v, err)
	}
	if err := e.PortForward(t.Context(), pod, 80, nil); !errors.Is(err, fault.Unavailable) || b.node.count("forward 80") != 1 {
		t.Errorf("port-forward: %v", err)
	}
	b.checkSandboxed(e, pod)

	b.close(e)
	b.node.set(func() { b.node.sandbox = false })
	e = b.engine()
	b.checkSandboxed(e, pod)
	if again := b.start(e, pod, "three"); b.task(again).sandbox != pod {
		t.Error("a container of the next server is in no sandbox")
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// checkSandboxed fails the test unless the runtime reports what the containers use.
func (b *bench) checkSandboxed(e *Engine, pod string) {
	b.Helper()
	for _, s := range e.Usage().ContainerStats(context.Background(), func(v *view.Container) bool { return v.SandboxID == pod }) {
		if s.Usage.CPU == nil || s.Usage.CPU.Total != 4711 {
			b.Errorf("a container uses %+v", s.Usage)
		}
	}
}

func limitOf(r *specs.LinuxResources) int64 {
	if r == nil || r.Memory == nil || r.Memory.Limit == nil {
		return 0
	}
	return *r.Memory.Limit
}

// A kubelet raises the limits of the pod's cgroup after those of the sandbox, which a kernel
// with cgroup v1 refuses: the sandbox gets them with the next update of a container, even from
// the next server, and the container is updated even if that fails.
func TestSandboxIsRaisedWithItsContainers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.node.set(func() { b.node.sandbox = true })
	e := b.engine()
	pod := b.run(e, "a")
	infra, c := b.task(pod), b.start(e, pod, "c")
	more := func() {
		t.Helper()
		if err := e.UpdateContainerResources(t.Context(), c, &cri.LinuxContainerResources{CpuShares: 99}); err != nil {
			t.Error(err)
		}
	}
	more()
	if n := len(infra.updates); n != 0 {
		t.Errorf("%d updates of a sandbox that has all", n)
	}
	if err := e.UpdateSandboxResources(t.Context(), pod, nil, &cri.LinuxContainerResources{MemoryLimitInBytes: 200 << 20}); err != nil {
		t.Fatal(err)
	}
	more()
	if n := len(infra.updates); n != 1 {
		t.Errorf("%d updates of a sandbox that got all at once", n)
	}
	b.close(e)
	e = b.engine() // which does not know that
	more()
	more()
	if n := len(infra.updates); n != 2 || limitOf(infra.updates[1].Resources) != 200<<20 {
		t.Errorf("%d updates of the sandbox, of which the last is %+v", n, infra.updates[n-1])
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// The runtime kills processes that a container left in the PID namespace of its pod, inside the
// sandbox, even if the container ended while no server was running.
func TestLeftoversInASandboxAreKilledByTheRuntime(t *testing.T) {
	for name, down := range map[string]bool{"while the server is up": false, "while it is down": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.node.set(func() { b.node.sandbox = true })
			e := b.engine()
			pod := b.run(e, "a")
			own := b.start(e, pod, "own")
			cfg := containerConfig("shared")
			cfg.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Pid: cri.NamespaceMode_POD}
			shared, err := e.CreateContainer(t.Context(), pod, cfg, nil)
			if err == nil {
				err = e.StartContainer(t.Context(), shared)
			}
			if err != nil {
				t.Fatal(err)
			}
			if down {
				b.close(e)
			}
			tasks := []*fakeTask{b.task(own), b.task(shared)}
			b.node.set(func() {
				for _, task := range tasks {
					task.die(3)
				}
			})
			if down {
				e = b.engine()
			}
			wait.For(t, "the leftovers to be killed", func() bool { return b.node.count("end leftovers "+shared) == 1 })
			b.remove(e, pod)
			if n := b.node.count("end leftovers " + own); n != 0 {
				t.Errorf("the runtime was asked %d times about a container with a PID namespace of its own", n)
			}
			b.nothingLeft()
		})
	}
}
