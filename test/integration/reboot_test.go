package integration

import (
	"fmt"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
)

// After a reboot nothing is running, and what is left on disk (records and
// addresses) is released when the pods are removed.
func TestReboot_crio_5549(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	var pods []*pod
	var containers []*container
	for i := range 2 {
		p := w.run(t, handlers[i%2])
		containers = append(containers, p.start(t, "sleep"))
		p.create(t, "sleep")
		done := p.start(t, "exit 5")
		done.wait(t)
		pods = append(pods, p)
	}
	if err := w.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, p := range pods {
		equal(t, "state of a pod", p.status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
		s := containers[i].status(t)
		equal(t, "state of a container that ran", s.State, cri.ContainerState_CONTAINER_EXITED)
		if s.ExitCode == 0 || s.FinishedAt < s.StartedAt {
			t.Errorf("a container that was running ended with code %d, started %d, finished %d", s.ExitCode, s.StartedAt, s.FinishedAt)
		}
		made := (&container{pod: p, id: p.made[3]}).status(t)
		equal(t, "exit code of a container that had ended before", made.ExitCode, 5)
	}
	for i, p := range pods {
		next := w.run(t, p.handler, func(c *cri.PodSandboxConfig) {
			c.Metadata.Name, c.Metadata.Uid = p.config.Metadata.Name, p.config.Metadata.Uid
			c.Metadata.Attempt = 1
		})
		equal(t, fmt.Sprintf("output of pod %d after the reboot", i), next.finish(t, "echo back"), "back\n")
		next.vanish(t)
		p.vanish(t)
	}
	w.Restored(t, w.empty)
}
