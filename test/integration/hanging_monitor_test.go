package integration

import (
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/node"
)

// Monitors that hang while the server is started again hold it up for seconds, and
// nobody else. Their containers run on and are said to be out of reach; they can
// be stopped, or go on as if nothing had been when the monitors are awake.
func TestServerStartsWhileMonitorsHang(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	var pods []*pod
	var asleep []int
	for _, handler := range handlers {
		p := w.run(t, handler, forPod)
		pods = append(pods, p)
		asleep = append(asleep, w.monitors(t, p.id)...)
		for _, line := range []string{"sleep", "ignore TERM ; sleep", "sleep"} {
			c := p.start(t, line, forContainer)
			asleep = append(asleep, w.monitors(t, c.id)...)
		}
	}
	wake := func() {
		for _, pid := range asleep {
			_ = unix.Kill(pid, unix.SIGCONT) // some are gone by then
		}
	}
	t.Cleanup(wake)
	well := w.run(t, "crun").start(t, "sleep")
	must(t, w.Kill())
	for _, pid := range asleep {
		must(t, unix.Kill(pid, unix.SIGSTOP))
	}
	began := time.Now()
	must(t, w.Start(t.Context()))
	if took := time.Since(began); took > 35*time.Second { // one after the other takes 40
		t.Errorf("the start took %v", took)
	}
	well.exec(t, "echo alive")
	var containers []*container
	for _, p := range pods {
		equal(t, "state of the pod", p.status(t).State, cri.PodSandboxState_SANDBOX_READY)
		list, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.id}})
		must(t, err)
		for _, c := range list.Containers {
			equal(t, "state of a container", c.State, cri.ContainerState_CONTAINER_RUNNING)
			containers = append(containers, &container{pod: p, id: c.Id})
		}
	}
	equal(t, "containers", len(containers), 3*len(pods))
	found := w.check(t)
	for _, c := range containers {
		if !found.says("FAIL", "container "+c.id, "does not answer") {
			t.Errorf("the check does not name %s: %+v", c.id, found)
		}
	}

	stopped := []*container{containers[0], containers[len(containers)-1]}
	for _, c := range stopped {
		c.stop(t, 1)
		s := c.status(t)
		equal(t, "state of the stopped container", s.State, cri.ContainerState_CONTAINER_EXITED)
		equal(t, "its exit code", s.ExitCode, 137)
	}
	wake()
	for _, c := range containers {
		if slices.Contains(stopped, c) {
			continue
		}
		if !eventually(func() bool {
			_, err := w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"/probe", "echo", "alive"}})
			return err == nil
		}) {
			t.Errorf("container %s is not taken up", c.id)
		}
	}
	for _, p := range pods {
		p.stop(t)
		p.remove(t)
	}
	w.silent(t, "when all are awake")
}
