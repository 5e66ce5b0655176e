package server

import (
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/pod"
)

// What a list shows of a pod or a container is what it is in, not what it was when
// it was listed first.
func TestListsShowTheLatestView(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.sandboxes, n.engine.containers = manySandboxes(3), manyContainers(3)
	for _, state := range []cri.ContainerState{cri.ContainerState_CONTAINER_RUNNING, cri.ContainerState_CONTAINER_EXITED} {
		container := *n.engine.containers[1]
		container.State, container.Memo = state, new(pod.Memo)
		n.engine.containers[1] = &container
		sandbox := *n.engine.sandboxes[1]
		sandbox.State, sandbox.Memo = cri.PodSandboxState(state%2), new(pod.Memo)
		n.engine.sandboxes[1] = &sandbox
		for range 2 { // encoded, and remembered
			containers, err := n.runtime.ListContainers(t.Context(), &cri.ListContainersRequest{})
			if err != nil {
				t.Fatal(err)
			}
			for i, got := range containers.Containers {
				want := &cri.Container{}
				fillContainer(want, n.engine.containers[i])
				if !proto.Equal(got, want) {
					t.Errorf("container %d is %v, want %v", i, got, want)
				}
			}
			sandboxes, err := n.runtime.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
			if err != nil {
				t.Fatal(err)
			}
			for i, got := range sandboxes.Items {
				want := &cri.PodSandbox{}
				fillSandbox(want, n.engine.sandboxes[i])
				if !proto.Equal(got, want) {
					t.Errorf("pod %d is %v, want %v", i, got, want)
				}
			}
			if len(containers.Containers) != 3 || len(sandboxes.Items) != 3 {
				t.Errorf("%d containers and %d pods of 3", len(containers.Containers), len(sandboxes.Items))
			}
		}
	}
}

// A thousand containers that have not changed cost a list no more than room for
// the answer.
func TestUnchangedIsNotEncodedAgain(t *testing.T) {
	containers := &containerAPI{engine: &fakeEngine{containers: manyContainers(1000)}}
	sandboxes := &sandboxAPI{engine: &fakeEngine{sandboxes: manySandboxes(1000)}}
	for what, list := range map[string]func() error{
		"containers": func() error {
			_, err := containers.ListContainers(t.Context(), &cri.ListContainersRequest{})
			return err
		},
		"pods": func() error {
			_, err := sandboxes.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
			return err
		},
	} {
		allocations := testing.AllocsPerRun(10, func() {
			if err := list(); err != nil {
				t.Fatal(err)
			}
		})
		if allocations > 100 {
			t.Errorf("a list of 1000 %s allocates %v times", what, allocations)
		}
	}
}
