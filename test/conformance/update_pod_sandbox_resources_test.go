package main_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

func updatePod(t *testing.T, w *scene.World, id string, memory int64) error {
	t.Helper()
	_, err := w.Runtime().UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{
		PodSandboxId: id,
		Overhead:     &cri.LinuxContainerResources{MemoryLimitInBytes: memory + 1, CpuShares: 77},
		Resources:    &cri.LinuxContainerResources{MemoryLimitInBytes: memory, CpuQuota: 43_210, CpuPeriod: 100_000},
	})
	return err
}

// info returns everything in the verbose status besides the status.
func info(t *testing.T, p *scene.Pod) string {
	t.Helper()
	resp, err := p.World.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.ID, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(resp.Info)
}

// The kubelet sends the sum of a pod's resources after each in-place resize
// (KEP-1287), for runtimes that size a virtual machine by it.
func TestUpdatePodSandboxResources(t *testing.T) {
	t.Parallel()
	w := commons.World(t)
	p := w.Pod(t, "crun")
	c := p.Start(t, "sleep", withResources(limited()))
	unchanged(t, c, "an update of the pod", func() {
		for _, memory := range []int64{123_456_000, 234_567_000} {
			if err := updatePod(t, w, p.ID, memory); err != nil {
				t.Fatal(err)
			}
			told := info(t, p)
			for _, number := range []int64{memory, memory + 1, 43_210} {
				if !strings.Contains(told, fmt.Sprint(number)) {
					t.Errorf("the verbose status does not tell %d: %s", number, told)
				}
			}
		}
	})
	scene.WantCode(t, updatePod(t, w, strings.Repeat("0", 64), 1), codes.NotFound)
	if _, err := w.Runtime().UpdatePodSandboxResources(t.Context(), &cri.UpdatePodSandboxResourcesRequest{PodSandboxId: p.ID}); err != nil {
		t.Errorf("an update of nothing: %v", err)
	}
	p.Stop(t)
	scene.WantOneOf(t, updatePod(t, w, p.ID, 1), []codes.Code{codes.FailedPrecondition, codes.OK})
	p.Remove(t)
	scene.WantCode(t, updatePod(t, w, p.ID, 1), codes.NotFound)
}
