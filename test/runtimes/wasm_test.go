package runtimes

import (
	"io"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/scene"
)

// A shim that makes and starts containers and can do nothing else, as those for
// WebAssembly: its pods run, their containers end as they should and can be
// stopped, what it cannot do is Unimplemented, and nothing of it is in the way of others.
func TestShimWithoutCommands(t *testing.T) {
	t.Parallel()
	config, err := tools.Handler(t.Context(), tools.Wasm)
	if err != nil {
		t.Skipf("NOT TESTED, there is no %s: %v", tools.Wasm, err)
	}
	w := scene.Private(t, node.Options{Config: config})
	if err := w.Settle(t.Context(), tools.Wasm); err != nil {
		t.Fatal(err)
	}
	p := w.Pod(t, tools.Wasm)
	done := p.Start(t, "echo done ; exit 7")
	scene.Equal(t, "exit code", done.Wait(t).ExitCode, int32(7))
	scene.Equal(t, "output", done.Output(t), "done\n")
	c, other := p.Start(t, "trap SIGTERM ; exit 5"), p.Start(t, "tcp :7002 echo ; echo all-set ; sleep")
	c.Says(t, "ready")
	other.Says(t, "all-set")

	_, err = w.Runtime().ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/probe", "facts"}})
	scene.WantCode(t, err, codes.Unimplemented, "Exec")
	_, err = w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
		ContainerId: c.ID, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: 77 * scene.MiB},
	})
	scene.WantCode(t, err, codes.Unimplemented, "Update")
	echoes(t, p, 7002) // by the pod's address

	// What is not accounted for is not in the way of what is.
	stats, err := w.Runtime().ListContainerStats(t.Context(), &cri.ListContainerStatsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{c.ID, other.ID} {
		if !slices.ContainsFunc(stats.Stats, func(s *cri.ContainerStats) bool { return s.Attributes.Id == id }) {
			t.Errorf("ListContainerStats has nothing of container %s", id)
		}
	}
	if _, err := w.Runtime().PodSandboxStats(t.Context(), &cri.PodSandboxStatsRequest{PodSandboxId: p.ID}); err != nil {
		t.Error(err)
	}
	scene.Equal(t, "state after all that", c.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)

	if err := w.Crash(t.Context()); err != nil {
		t.Fatal(err)
	}
	scene.Equal(t, "state after a crash of the server", c.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	c.Stop(t, scene.LimitSeconds)
	scene.Equal(t, "exit code of what was stopped", c.Status(t).ExitCode, int32(5))
	shim, _ := shimOf(t, runDir(other))
	kill(t, shim)
	scene.Equal(t, "exit code of what has lost its shim", other.Wait(t).ExitCode, int32(137))
	p.Stop(t)
	p.Remove(t)
	w.Bare(t)
}

// echoes expects that what is sent to a port of a pod comes back.
func echoes(t *testing.T, p *scene.Pod, port int) {
	t.Helper()
	w := p.World
	resp, err := w.Runtime().PortForward(t.Context(), &cri.PortForwardRequest{PodSandboxId: p.ID})
	if err != nil {
		t.Fatal(err)
	}
	tunnel, err := kubelet.Streams{Within: w.Do}.Tunnel(t.Context(), resp.Url)
	if err != nil {
		t.Fatal(err)
	}
	defer tunnel.Close()
	wire, err := tunnel.Connect(port)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(wire, "ping"); err != nil {
		t.Fatal(err)
	}
	if err := wire.Close(); err != nil {
		t.Fatal(err)
	}
	scene.Equal(t, "answer of the port", all(t, wire), "ping")
	scene.Equal(t, "error stream", all(t, wire.Errors), "")
}
