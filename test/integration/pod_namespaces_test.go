package integration

import (
	"fmt"
	"os"
	"slices"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images/facts"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestContainersOfAPodShareIPCAndUTSNamespaces(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		a, b := p.start(t, "sleep").facts(t), p.start(t, "sleep").facts(t)
		for _, kind := range []string{"net", "ipc", "uts"} {
			equal(t, kind+" namespace", a.Namespaces[kind], b.Namespaces[kind])
			if own, _ := os.Readlink("/proc/self/ns/" + kind); a.Namespaces[kind] == own {
				t.Errorf("the pod is in the node's %s namespace", kind)
			}
		}
		for _, kind := range []string{"mnt", "pid"} {
			if a.Namespaces[kind] == b.Namespaces[kind] {
				t.Errorf("two containers share the %s namespace %s", kind, a.Namespaces[kind])
			}
		}
	})
}

// pidMode sets a pod's or a container's PID namespace.
func pidMode(mode cri.NamespaceMode) (podChange, containerChange) {
	return func(c *cri.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = mode },
		func(c *cri.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = mode }
}

func TestPIDNamespacePerContainer(t *testing.T) {
	t.Parallel()
	w := shared(t)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		p.start(t, "sleep 1h")
		f := p.facts(t)
		equal(t, "pid", f.PID, 1)
		equal(t, "number of visible processes", len(f.Processes), 1)
	})
}

func TestPIDNamespaceOfThePodHasAnInitOfItsOwn(t *testing.T) {
	t.Parallel()
	w := shared(t)
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler, forPod)
		first := p.start(t, "sleep 1h", forContainer)
		f := p.facts(t, forContainer)
		if f.PID == 1 {
			t.Error("a container is PID 1 of the pod's namespace: its end would end the others")
		}
		if !slices.Contains(values(f.Processes), "/probe sleep 1h") {
			t.Errorf("the other container's process is not visible in %v", f.Processes)
		}
		// The init must reap an orphan: it must not stay as a zombie.
		first.exec(t, "orphan sleep 10ms")
		wait.For(t, "the pod's init to reap the orphan", func() bool { return !zombies(first.facts(t)) })
		equal(t, "exit code when another container of the namespace has ended", p.start(t, "exit 4", forContainer).wait(t).ExitCode, 4)
		equal(t, "state of the first container", first.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	})
}

func values(m map[int]string) []string {
	var out []string
	for _, v := range m {
		out = append(out, v)
	}
	return out
}

// zombies reports whether a process has no command line, as zombies do; kernel
// threads are not visible in a container.
func zombies(f *facts.Facts) bool { return slices.Contains(values(f.Processes), "") }

func TestPIDNamespaceOfTheNode(t *testing.T) {
	t.Parallel()
	w := shared(t)
	forPod, forContainer := pidMode(cri.NamespaceMode_NODE)
	own, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	p := w.run(t, "crun", forPod)
	equal(t, "PID namespace", p.facts(t, forContainer).Namespaces["pid"], own)
}

func TestIPCNamespaceOfTheNode(t *testing.T) {
	t.Parallel()
	w := shared(t)
	own, err := os.Readlink("/proc/self/ns/ipc")
	if err != nil {
		t.Fatal(err)
	}
	p := w.run(t, "crun", func(c *cri.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Ipc = cri.NamespaceMode_NODE
	})
	f := p.facts(t, func(c *cri.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Ipc = cri.NamespaceMode_NODE
	})
	equal(t, "IPC namespace", f.Namespaces["ipc"], own)
	if m := f.Mount("/dev/shm"); m == nil {
		t.Error("no /dev/shm")
	}
}

func TestHostPIDAndIPCDoNotOpenTheHostsNetwork(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc", func(c *cri.PodSandboxConfig) {
		o := c.Linux.SecurityContext.NamespaceOptions
		o.Pid, o.Ipc = cri.NamespaceMode_NODE, cri.NamespaceMode_NODE
	})
	f := p.facts(t, func(c *cri.ContainerConfig) {
		o := c.Linux.SecurityContext.NamespaceOptions
		o.Pid, o.Ipc = cri.NamespaceMode_NODE, cri.NamespaceMode_NODE
	})
	if f.Namespaces["net"] == w.netNS(t) {
		t.Error("the pod is in the node's network namespace")
	}
	equal(t, "namespace options in the status", fmt.Sprint(p.status(t).Linux.Namespaces.Options),
		fmt.Sprint(p.config.Linux.SecurityContext.NamespaceOptions))
}
