package main_test

import (
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// TestAfterStopPodSandbox tests what the kubelet relies on once StopPodSandbox
// has returned: no process, no network, every container exited, and the pod not
// ready, however often it is asked.
func TestAfterStopPodSandbox(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun")
	stubborn := p.Start(t, "ignore TERM ; fork 2 sleep ; echo ready ; sleep")
	stubborn.Says(t, "ready")
	all := []*scene.Container{stubborn, p.Start(t, "trap TERM"), p.Start(t, "exit 3"), p.Create(t, "sleep")}
	all[2].Wait(t)
	ip := p.Status(t).Network.Ip
	if ip == "" {
		t.Fatal("the pod has no address")
	}
	for range 3 {
		p.Stop(t)
		s := p.Status(t)
		scene.Equal(t, "state of the pod", s.State, cri.PodSandboxState_SANDBOX_NOTREADY)
		if n := s.GetNetwork(); n.GetIp() != "" || len(n.GetAdditionalIps()) > 0 {
			t.Errorf("the stopped pod still has the addresses %v", n)
		}
	}
	for i, c := range all[:3] {
		s := c.Status(t)
		scene.Equal(t, "state of a container", s.State, cri.ContainerState_CONTAINER_EXITED)
		if s.FinishedAt == 0 || i == 0 && s.ExitCode != 137 || i == 2 && s.ExitCode != 3 {
			t.Errorf("container %d: finished at %d with code %d", i, s.FinishedAt, s.ExitCode)
		}
		if pids := c.Processes(t); len(pids) > 0 {
			t.Errorf("container %d still has the processes %v", i, pids)
		}
	}
	// A container that never ran has nothing left either, and can't be started.
	scene.Equal(t, "state of the container that never ran", all[3].Status(t).State, cri.ContainerState_CONTAINER_EXITED)
	scene.WantCode(t, all[3].TryStart(t.Context()), codes.FailedPrecondition)
	noProcess(t, p)
	for _, line := range p.Traces(t) {
		for _, kind := range []string{"lease:", "link:", "rule:"} {
			if strings.HasPrefix(line, kind) {
				t.Errorf("after the stop: %s", line)
			}
		}
	}
	_, err := p.Try(t.Context(), "sleep")
	scene.WantCode(t, err, codes.FailedPrecondition, p.ID[:12])
	_, err = w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: all[0].ID, Cmd: []string{"/probe"}})
	scene.WantCode(t, err, codes.FailedPrecondition)
	p.Remove(t)
	p.Stop(t) // a missing pod counts as stopped
	p.Remove(t)
}

// noProcess checks that a stopped pod has no processes, including monitors:
// these exit when they have reported everything.
func noProcess(t *testing.T, p *scene.Pod) {
	t.Helper()
	var left []string
	if !wait.Until(t.Context(), func() bool {
		left = slices.DeleteFunc(p.Traces(t), func(line string) bool { return !strings.HasPrefix(line, "process:") })
		return len(left) == 0
	}) {
		t.Errorf("after the stop: %q", left)
	}
}

func TestStopPodSandboxManyAtOnce(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun")
	c := p.Start(t, "ignore TERM ; echo ready ; sleep")
	c.Says(t, "ready")
	var all sync.WaitGroup
	for range 5 {
		all.Go(func() { p.Stop(t) })
	}
	all.Wait()
	scene.Equal(t, "exit code", c.Status(t).ExitCode, 137)
}
