package server

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
)

func manySandboxes(n int) []*view.Sandbox {
	views := make([]*view.Sandbox, n)
	for i := range views {
		views[i] = &view.Sandbox{
			Memo: new(view.Memo),
			ID:   idOf(i), Handler: "runc", State: cri.PodSandboxState(i % 2), CreatedAt: time.Unix(int64(i), 0),
			Config: &cri.PodSandboxConfig{
				Metadata:    &cri.PodSandboxMetadata{Name: fmt.Sprint("pod", i), Namespace: "default", Uid: fmt.Sprint(i)},
				Labels:      map[string]string{"app": fmt.Sprint("app", i%10), "tier": "web"},
				Annotations: map[string]string{"note": strings.Repeat("x", 1800)},
			},
		}
	}
	return views
}

func manyContainers(n int) []*view.Container {
	views := make([]*view.Container, n)
	for i := range views {
		views[i] = &view.Container{
			Memo: new(view.Memo),
			ID:   idOf(i), SandboxID: idOf(i / 10), Handler: "runc", ImageID: idOf(i % 7), State: cri.ContainerState(i % 4),
			CreatedAt: time.Unix(int64(i), 0),
			Config: &cri.ContainerConfig{
				Metadata:    &cri.ContainerMetadata{Name: fmt.Sprint("c", i)},
				Image:       &cri.ImageSpec{Image: idOf(i % 7), UserSpecifiedImage: "registry.example/web:1"},
				Labels:      map[string]string{"app": fmt.Sprint("app", i%10)},
				Annotations: map[string]string{"hash": "12345678"},
			},
		}
	}
	return views
}

// received collects what a list stream sends and checks that no message is
// empty or large.
func received[R, T any](t *testing.T, stream grpc.ServerStreamingClient[R], err error, items func(*R) []T) []T {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	var all []T
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(items(m)) == 0 {
			t.Error("empty message in the stream")
		}
		if size := proto.Size(any(m).(proto.Message)); size > 2*chunkSize {
			t.Errorf("message of %d bytes", size)
		}
		all = append(all, items(m)...)
	}
}

// KEP-5825: the node has more pods than fit into one message.
func TestStreamsOfLargeLists(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.sandboxes = manySandboxes(10_000)
	_, err := n.runtime.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	wantCode(t, err, codes.ResourceExhausted)

	stream, err := n.runtime.StreamPodSandboxes(t.Context(), &cri.StreamPodSandboxesRequest{})
	got := received(t, stream, err, (*cri.StreamPodSandboxesResponse).GetPodSandboxes)
	if len(got) != len(n.engine.sandboxes) {
		t.Fatalf("%d of %d pods", len(got), len(n.engine.sandboxes))
	}
	for i, p := range got {
		want := &cri.PodSandbox{}
		fillSandbox(want, n.engine.sandboxes[i])
		if !proto.Equal(p, want) {
			t.Fatalf("pod %d is %v, want %v", i, p, want)
		}
	}
}

func TestStreamsFilterAsLists(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.sandboxes, n.engine.containers = manySandboxes(30), manyContainers(300)
	sandboxes, err := n.runtime.StreamPodSandboxes(t.Context(), &cri.StreamPodSandboxesRequest{Filter: &cri.PodSandboxFilter{Id: idOf(5)}})
	if got := received(t, sandboxes, err, (*cri.StreamPodSandboxesResponse).GetPodSandboxes); len(got) != 1 || got[0].Id != idOf(5) {
		t.Errorf("got %v", got)
	}
	containers, err := n.runtime.StreamContainers(t.Context(), &cri.StreamContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: idOf(5)}})
	if got := received(t, containers, err, (*cri.StreamContainersResponse).GetContainers); len(got) != 10 || got[0].PodSandboxId != idOf(5) {
		t.Errorf("got %v", got)
	}
	none, err := n.runtime.StreamContainers(t.Context(), &cri.StreamContainersRequest{Filter: &cri.ContainerFilter{Id: "non-existent-id"}})
	if got := received(t, none, err, (*cri.StreamContainersResponse).GetContainers); len(got) != 0 {
		t.Errorf("got %v", got)
	}
	images, err := n.image.StreamImages(t.Context(), &cri.StreamImagesRequest{})
	if got := received(t, images, err, (*cri.StreamImagesResponse).GetImages); len(got) != 1 || got[0].Id != idOf(9) {
		t.Errorf("got %v", got)
	}
	broken, err := n.runtime.StreamContainers(t.Context(), &cri.StreamContainersRequest{Filter: &cri.ContainerFilter{State: &cri.ContainerStateValue{State: 9}}})
	if err == nil {
		_, err = broken.Recv()
	}
	wantCode(t, err, codes.InvalidArgument)
}

func TestInChunks(t *testing.T) {
	t.Parallel()
	item := func(size int) *cri.PodSandbox { return &cri.PodSandbox{Id: strings.Repeat("x", size)} }
	for _, c := range []struct {
		items []*cri.PodSandbox
		want  []int // items in each chunk
	}{
		{nil, nil},
		{[]*cri.PodSandbox{item(1)}, []int{1}},
		{[]*cri.PodSandbox{item(1), item(2)}, []int{2}},
		{[]*cri.PodSandbox{item(chunkSize), item(1)}, []int{1, 1}},
		{[]*cri.PodSandbox{item(1), item(chunkSize), item(1), item(1)}, []int{1, 1, 2}},
		{[]*cri.PodSandbox{item(10 * chunkSize)}, []int{1}},
		{[]*cri.PodSandbox{item(chunkSize/2 - 8), item(chunkSize/2 - 8), item(chunkSize / 2)}, []int{2, 1}},
	} {
		var sizes []int
		var sent []*cri.PodSandbox
		err := inChunks(c.items, messageSize, func(chunk []*cri.PodSandbox) error {
			sizes, sent = append(sizes, len(chunk)), append(sent, chunk...)
			return nil
		})
		if err != nil || !slices.Equal(sizes, c.want) || !slices.Equal(sent, c.items) {
			t.Errorf("chunks %v, want %v (%v)", sizes, c.want, err)
		}
	}
	broken := errors.New("client gone")
	calls := 0
	err := inChunks([]*cri.PodSandbox{item(chunkSize), item(chunkSize), item(1)}, messageSize, func([]*cri.PodSandbox) error { calls++; return broken })
	if !errors.Is(err, broken) || calls != 1 {
		t.Errorf("%d sends after a failed one: %v", calls, err)
	}
}

func TestSandboxFilter(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.sandboxes = manySandboxes(20)
	ready := &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}
	for _, c := range []struct {
		filter *cri.PodSandboxFilter
		want   int
	}{
		{nil, 20},
		{&cri.PodSandboxFilter{}, 20},
		{&cri.PodSandboxFilter{Id: idOf(3)}, 1},
		{&cri.PodSandboxFilter{Id: "00000"}, 20},
		{&cri.PodSandboxFilter{Id: idOf(1)[:63]}, 16},
		{&cri.PodSandboxFilter{Id: "non-existent-id"}, 0},
		{&cri.PodSandboxFilter{State: ready}, 10},
		{&cri.PodSandboxFilter{LabelSelector: map[string]string{"app": "app3"}}, 2},
		{&cri.PodSandboxFilter{LabelSelector: map[string]string{"app": "app3", "tier": "web"}}, 2},
		{&cri.PodSandboxFilter{LabelSelector: map[string]string{"app": "app3", "tier": "db"}}, 0},
		{&cri.PodSandboxFilter{LabelSelector: map[string]string{"missing": ""}}, 0},
		{&cri.PodSandboxFilter{State: ready, LabelSelector: map[string]string{"app": "app3"}}, 0},
		{&cri.PodSandboxFilter{Id: idOf(4), State: ready, LabelSelector: map[string]string{"app": "app4"}}, 1},
	} {
		resp, err := n.runtime.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{Filter: c.filter})
		if err != nil || len(resp.GetItems()) != c.want {
			t.Errorf("%v: %d pods, want %d (%v)", c.filter, len(resp.GetItems()), c.want, err)
		}
	}
	_, err := n.runtime.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: 7}}})
	wantCode(t, err, codes.InvalidArgument)
}

func TestContainerFilter(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.containers = manyContainers(40)
	running := &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}
	for _, c := range []struct {
		filter *cri.ContainerFilter
		want   int
	}{
		{nil, 40},
		{&cri.ContainerFilter{Id: idOf(3)}, 1},
		{&cri.ContainerFilter{Id: "0000"}, 40},
		{&cri.ContainerFilter{PodSandboxId: idOf(2)}, 10},
		{&cri.ContainerFilter{PodSandboxId: "000"}, 40},
		{&cri.ContainerFilter{PodSandboxId: "nowhere"}, 0},
		{&cri.ContainerFilter{State: running}, 10},
		{&cri.ContainerFilter{LabelSelector: map[string]string{"app": "app3"}}, 4},
		{&cri.ContainerFilter{State: running, PodSandboxId: idOf(0), LabelSelector: map[string]string{"app": "app5"}}, 1},
	} {
		resp, err := n.runtime.ListContainers(t.Context(), &cri.ListContainersRequest{Filter: c.filter})
		if err != nil || len(resp.GetContainers()) != c.want {
			t.Errorf("%v: %d containers, want %d (%v)", c.filter, len(resp.GetContainers()), c.want, err)
		}
	}
	_, err := n.runtime.ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{State: &cri.ContainerStateValue{State: -1}}})
	wantCode(t, err, codes.InvalidArgument)
}

// Views are shared by all readers, down to the bytes of their maps: the race
// detector sees whoever writes.
func TestReadersShareViews(t *testing.T) {
	t.Parallel()
	n := start(t)
	n.engine.sandboxes, n.engine.containers = manySandboxes(50), manyContainers(50)
	var readers errgroup.Group
	for range 8 {
		readers.Go(func() error {
			_, err1 := n.runtime.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
			_, err2 := n.runtime.ListContainers(t.Context(), &cri.ListContainersRequest{})
			_, err3 := n.runtime.ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: idOf(1), Verbose: true})
			_, err4 := n.runtime.PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: idOf(1), Verbose: true})
			return errors.Join(err1, err2, err3, err4)
		})
	}
	if err := readers.Wait(); err != nil {
		t.Error(err)
	}
}
