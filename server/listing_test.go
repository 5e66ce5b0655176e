package server

import (
	"errors"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
)

// A list shows the present state of a pod or a container, not that at the first
// list.
func TestListsShowTheLatestView(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.sandboxes, n.engine.containers = manySandboxes(3), manyContainers(3)
	for _, state := range []cri.ContainerState{cri.ContainerState_CONTAINER_RUNNING, cri.ContainerState_CONTAINER_EXITED} {
		container := *n.engine.containers[1]
		container.State, container.Memo = state, new(view.Memo)
		n.engine.containers[1] = &container
		sandbox := *n.engine.sandboxes[1]
		sandbox.State, sandbox.Memo = cri.PodSandboxState(state%2), new(view.Memo)
		n.engine.sandboxes[1] = &sandbox
		for _, api := range []string{packageV1, packageAlpha} { // encoded, and cached
			containers, sandboxes := &cri.ListContainersResponse{}, &cri.ListPodSandboxResponse{}
			err := errors.Join(
				n.conn.Invoke(t.Context(), "/"+api+"RuntimeService/ListContainers", &cri.ListContainersRequest{}, containers),
				n.conn.Invoke(t.Context(), "/"+api+"RuntimeService/ListPodSandbox", &cri.ListPodSandboxRequest{}, sandboxes))
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

// For a thousand unchanged containers a list only allocates the answer.
func TestUnchangedIsNotEncodedAgain(t *testing.T) {
	containers := &containerAPI{engine: &fakeEngine{containers: manyContainers(1000)}}
	sandboxes := &sandboxAPI{engine: &fakeEngine{sandboxes: manySandboxes(1000)}}
	for what, list := range map[string]func() error{
		"containers": func() error {
			_, err := containers.containerList(nil)
			return err
		},
		"pods": func() error {
			_, err := sandboxes.sandboxList(nil)
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

// The kubelet lists twice a second for as long as the node lives.
func BenchmarkListContainersOverSocket(b *testing.B) {
	n := start(b)
	n.engine.containers = manyContainers(2000)
	req := &cri.ListContainersRequest{}
	b.ReportAllocs()
	for b.Loop() {
		if resp, err := n.runtime.ListContainers(b.Context(), req); err != nil || len(resp.Containers) != 2000 {
			b.Fatal(err)
		}
	}
}

// unread is gRPC's codec, except that it reads only the size of an answer.
type unread struct{ encoding.CodecV2 }

func (u unread) Unmarshal(data mem.BufferSlice, v any) error {
	if size, ok := v.(*int); ok {
		*size = data.Len()
		return nil
	}
	return u.CodecV2.Unmarshal(data, v)
}

// The cost for the server, without its client.
func BenchmarkListContainersUnread(b *testing.B) {
	n := start(b)
	n.engine.containers = manyContainers(2000)
	b.ReportAllocs()
	for b.Loop() {
		size := 0
		err := n.conn.Invoke(b.Context(), cri.RuntimeService_ListContainers_FullMethodName, &cri.ListContainersRequest{}, &size, grpc.ForceCodecV2(unread{newCodec()}))
		if err != nil || size < 2000*64 {
			b.Fatalf("%d bytes, %v", size, err)
		}
	}
}

// manyInPod gives the engine one pod with n containers, and returns its id.
func (f *fakeEngine) manyInPod(n int) (id string) {
	id = idOf(n + 1)
	f.sandboxes = []*view.Sandbox{{ID: id, Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "many"}}}}
	f.containers = manyContainers(n)
	for _, c := range f.containers {
		c.SandboxID = id
		c.Mounts = []*cri.Mount{{ContainerPath: "/etc/hosts", HostPath: "/var/lib/kubelet/hosts"}}
		c.Resources = &cri.ContainerResources{Linux: &cri.LinuxContainerResources{CpuShares: 2}}
	}
	return id
}

// A kubelet asks for the status of a pod whenever something in it has changed. Of each container that
// takes few objects: its maps are gone through once for their size and once for their text.
func TestStatusOfManyContainersTakesFewObjects(t *testing.T) {
	allocations := func(containers int) float64 {
		engine := &fakeEngine{}
		id := engine.manyInPod(containers)
		api := &sandboxAPI{engine: engine}
		return testing.AllocsPerRun(20, func() {
			resp, err := api.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: id})
			if err != nil || len(resp.ContainersStatuses) != containers {
				t.Fatalf("%d containers, %v", len(resp.GetContainersStatuses()), err)
			}
			data, err := newCodec().Marshal(resp)
			if err != nil {
				t.Fatal(err)
			}
			data.Free()
		})
	}
	const more, most = 80, 12
	if each := (allocations(20+more) - allocations(20)) / more; each > most {
		t.Errorf("the status of a container in that of its pod takes %.1f objects, want %d at most", each, most)
	}
}

// The cost of the status of a pod with many containers for the server, without its client.
func BenchmarkPodSandboxStatusUnread(b *testing.B) {
	n := start(b)
	id := n.engine.manyInPod(20)
	b.ReportAllocs()
	for b.Loop() {
		size := 0
		err := n.conn.Invoke(b.Context(), cri.RuntimeService_PodSandboxStatus_FullMethodName, &cri.PodSandboxStatusRequest{PodSandboxId: id}, &size, grpc.ForceCodecV2(unread{newCodec()}))
		if err != nil || size < 20*64 {
			b.Fatalf("%d bytes, %v", size, err)
		}
	}
}
