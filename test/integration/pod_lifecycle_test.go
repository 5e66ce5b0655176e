package integration

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var unknownID = strings.Repeat("0123456789abcdef", 4)

func TestRemovePodKillsWhatRuns(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "crun")
	p.start(t, "ignore TERM ; sleep")
	p.create(t, "sleep") // never started
	p.remove(t)
}

func TestUnknownPodsAndContainers(t *testing.T) {
	t.Parallel()
	w := shared(t)
	r, ctx := w.Runtime(), t.Context()
	if _, err := r.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: unknownID}); err != nil {
		t.Errorf("StopPodSandbox of an unknown id: %v", err)
	}
	if _, err := r.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: unknownID}); err != nil {
		t.Errorf("RemovePodSandbox of an unknown id: %v", err)
	}
	if _, err := r.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: unknownID}); err != nil {
		t.Errorf("RemoveContainer of an unknown id: %v", err)
	}
	_, err := r.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: unknownID})
	wantCode(t, err, codes.NotFound, unknownID)
	_, err = r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: unknownID})
	wantCode(t, err, codes.NotFound, unknownID)
	_, err = r.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: unknownID})
	wantCode(t, err, codes.NotFound, unknownID)
	_, err = r.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: unknownID, Cmd: []string{"/probe"}})
	wantCode(t, err, codes.NotFound, unknownID)
	_, err = r.ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: unknownID})
	wantCode(t, err, codes.NotFound, unknownID)
	_, err = r.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: unknownID, Linux: &cri.LinuxContainerResources{CpuShares: 2}})
	wantCode(t, err, codes.NotFound, unknownID)
}

func TestAPodOfTheSameNameMayComeBack(t *testing.T) {
	t.Parallel()
	w := shared(t)
	first := w.run(t, "crun")
	first.stop(t)
	second := w.run(t, "crun", func(c *cri.PodSandboxConfig) {
		c.Metadata = &cri.PodSandboxMetadata{Name: first.config.Metadata.Name, Uid: first.config.Metadata.Uid, Namespace: "default", Attempt: 1}
	})
	if first.id == second.id {
		t.Error("attempt 1 has the id of attempt 0")
	}
	second.finish(t, "echo runs")
}

func TestListsFilter(t *testing.T) {
	t.Parallel()
	w := shared(t)
	r, ctx := w.Runtime(), t.Context()
	mark := func(value string) map[string]string { return map[string]string{"test": t.Name(), "value": value} }
	a := w.run(t, "runc", func(c *cri.PodSandboxConfig) { c.Labels = mark("a") })
	b := w.run(t, "crun", func(c *cri.PodSandboxConfig) { c.Labels = mark("b") })
	running := a.start(t, "sleep", func(c *cri.ContainerConfig) { c.Labels = mark("running") })
	created := a.create(t, "sleep", func(c *cri.ContainerConfig) { c.Labels = mark("created") })
	exited := b.start(t, "exit 0", func(c *cri.ContainerConfig) { c.Labels = mark("exited") })
	exited.wait(t)
	b.stop(t)

	pods := map[string]struct {
		filter *cri.PodSandboxFilter
		want   []string
	}{
		"label":        {&cri.PodSandboxFilter{LabelSelector: mark("a")}, []string{a.id}},
		"both":         {&cri.PodSandboxFilter{LabelSelector: map[string]string{"test": t.Name()}}, []string{a.id, b.id}},
		"id":           {&cri.PodSandboxFilter{Id: a.id}, []string{a.id}},
		"id prefix":    {&cri.PodSandboxFilter{Id: a.id[:13]}, []string{a.id}},
		"not ready":    {&cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_NOTREADY}, LabelSelector: map[string]string{"test": t.Name()}}, []string{b.id}},
		"ready":        {&cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}, LabelSelector: map[string]string{"test": t.Name()}}, []string{a.id}},
		"nothing":      {&cri.PodSandboxFilter{LabelSelector: map[string]string{"test": "no such"}}, nil},
		"unknown id":   {&cri.PodSandboxFilter{Id: unknownID}, nil},
		"id and label": {&cri.PodSandboxFilter{Id: a.id, LabelSelector: mark("b")}, nil},
	}
	for name, c := range pods {
		resp, err := r.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: c.filter})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var got []string
		for _, item := range resp.Items {
			got = append(got, item.Id)
		}
		equalSet(t, "pods by "+name, got, c.want)
	}

	state := func(s cri.ContainerState) *cri.ContainerStateValue { return &cri.ContainerStateValue{State: s} }
	containers := map[string]struct {
		filter *cri.ContainerFilter
		want   []string
	}{
		"pod":       {&cri.ContainerFilter{PodSandboxId: a.id}, []string{running.id, created.id}},
		"id":        {&cri.ContainerFilter{Id: running.id}, []string{running.id}},
		"id prefix": {&cri.ContainerFilter{Id: running.id[:13]}, []string{running.id}},
		"label":     {&cri.ContainerFilter{LabelSelector: mark("exited")}, []string{exited.id}},
		"running":   {&cri.ContainerFilter{PodSandboxId: a.id, State: state(cri.ContainerState_CONTAINER_RUNNING)}, []string{running.id}},
		"created":   {&cri.ContainerFilter{PodSandboxId: a.id, State: state(cri.ContainerState_CONTAINER_CREATED)}, []string{created.id}},
		"exited":    {&cri.ContainerFilter{PodSandboxId: b.id, State: state(cri.ContainerState_CONTAINER_EXITED)}, []string{exited.id}},
		"other pod": {&cri.ContainerFilter{Id: running.id, PodSandboxId: b.id}, nil},
	}
	for name, c := range containers {
		resp, err := r.ListContainers(ctx, &cri.ListContainersRequest{Filter: c.filter})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var got []string
		for _, item := range resp.Containers {
			got = append(got, item.Id)
		}
		equalSet(t, "containers by "+name, got, c.want)
	}
}

// equalSet compares regardless of order.
func equalSet(t *testing.T, what string, got, want []string) {
	t.Helper()
	got, want = slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))
	if !slices.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestStreamedListsEqualTheLists(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	p.start(t, "sleep")
	r, ctx := w.Runtime(), t.Context()

	pods, err := r.StreamPodSandboxes(ctx, &cri.StreamPodSandboxesRequest{Filter: &cri.PodSandboxFilter{Id: p.id}})
	if err != nil {
		t.Fatal(err)
	}
	var podIDs []string
	receive(t, pods.Recv, func(m *cri.StreamPodSandboxesResponse) {
		for _, s := range m.PodSandboxes {
			podIDs = append(podIDs, s.Id)
		}
	})
	equalSlices(t, "streamed pods", podIDs, []string{p.id})

	containers, err := r.StreamContainers(ctx, &cri.StreamContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.id}})
	if err != nil {
		t.Fatal(err)
	}
	var containerIDs []string
	receive(t, containers.Recv, func(m *cri.StreamContainersResponse) {
		for _, c := range m.Containers {
			containerIDs = append(containerIDs, c.Id)
		}
	})
	equalSlices(t, "streamed containers", containerIDs, p.made[1:])

	images, err := w.Images().StreamImages(ctx, &cri.StreamImagesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	receive(t, images.Recv, func(m *cri.StreamImagesResponse) {
		for _, i := range m.Images {
			names = append(names, i.RepoTags...)
		}
	})
	if !slices.Contains(names, probe) {
		t.Errorf("streamed images %v lack %s", names, probe)
	}
}

// receive reads a stream to its end.
func receive[M any](t *testing.T, next func() (M, error), each func(M)) {
	t.Helper()
	for {
		m, err := next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		each(m)
	}
}
