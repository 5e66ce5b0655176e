package faults

import (
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/scene"
)

func limited(c *cri.ContainerConfig) {
	const limit = 32 * scene.MiB
	c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: limit, MemorySwapLimitInBytes: limit}
}

// Every container that the OOM killer has ended is reported as OOMKilled, and none that ended
// otherwise.
func TestOOMKilledAlwaysAndOnlyThen_containerd_6323(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	deaths := []struct {
		line    string
		sigkill bool
		code    int32
		reason  string
	}{
		{"alloc 200", false, 137, "OOMKilled"},
		{"fork 3 alloc 200 ; alloc 200", false, 137, "OOMKilled"},
		{"run /probe alloc 200", false, 1, "Error"}, // only the child
		{"alloc 8 ; sleep", true, 137, "Error"},
	}
	const side = 4
	rounds := many(1, 1000/(side*3))
	seen := make([]int, len(deaths))
	for range rounds {
		pods := [side]*scene.Pod{}
		for i := range pods {
			pods[i] = w.Pod(t, scene.Handlers[i%2])
		}
		for i, death := range deaths {
			var group sync.WaitGroup
			for _, p := range pods {
				c := p.Start(t, death.line, limited)
				if death.sigkill {
					c.Says(t, "allocated 8 MiB")
					for _, pid := range c.Processes(t) {
						if err := unix.Kill(pid, unix.SIGKILL); err != nil {
							t.Fatal(err)
						}
					}
				}
				group.Go(func() {
					s := c.Wait(t)
					if s.ExitCode != death.code || s.Reason != death.reason {
						t.Errorf("%q ended with code %d, %s; want %d, %s", death.line, s.ExitCode, s.Reason, death.code, death.reason)
					}
				})
			}
			group.Wait()
			seen[i] += side
		}
		for _, p := range pods {
			p.Stop(t)
			p.Remove(t)
		}
	}
	for i, death := range deaths {
		t.Logf("%d times %q: %s", seen[i], death.line, death.reason)
	}
}
