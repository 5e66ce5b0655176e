package main_test

import (
	"context"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/scene"
)

// held is an event of a pod that a plugin does not answer before the test releases it.
type held struct {
	plugin  *nriplugin.Plugin
	reached chan nriplugin.Event
	release func()
}

func hold(t *testing.T, w *scene.World, event string, pod *cri.PodSandboxConfig) *held {
	t.Helper()
	released := make(chan struct{})
	h := &held{reached: make(chan nriplugin.Event, 1), release: sync.OnceFunc(func() { close(released) })}
	h.plugin = w.Plugin(t, "10", &nriplugin.Plugin{Answer: func(e nriplugin.Event) error {
		if e.Name == event && e.Pod.Uid == pod.Metadata.Uid {
			h.reached <- e
			<-released
		}
		return nil
	}})
	t.Cleanup(h.release)
	return h
}

func (h *held) wait(t *testing.T) nriplugin.Event {
	t.Helper()
	return scene.Receive(t, "the plugin's hook to run", h.reached)
}

// answer is what came of a call that another goroutine makes.
type answer struct {
	id  string
	err error
}

func call(f func() (id string, err error)) <-chan answer {
	c := make(chan answer, 1)
	go func() { id, err := f(); c <- answer{id, err} }()
	return c
}

// good waits for the answer of a call, which must have worked.
func good(t *testing.T, c <-chan answer) (id string) {
	t.Helper()
	a := scene.Receive(t, "the call to return", c)
	if a.err != nil {
		t.Fatal(a.err)
	}
	return a.id
}

func runPod(ctx context.Context, w *scene.World, handler string, config *cri.PodSandboxConfig) (string, error) {
	resp, err := w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	return resp.GetPodSandboxId(), err
}

// podIsHidden checks that neither a list nor a status shows a pod while its RunPodSandbox hook
// runs.
func podIsHidden(t *testing.T, w *scene.World, handler string) {
	config := w.PodConfig(t)
	hook := hold(t, w, "RunPodSandbox", config)
	run := call(func() (string, error) { return runPod(t.Context(), w, handler, config) })
	id := hook.wait(t).Pod.Id
	if slices.Contains(podIDs(t, w), id) {
		t.Error("the pod is listed")
	}
	_, err := w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: id})
	scene.WantCode(t, err, codes.NotFound)
	hook.release()
	p := w.Adopt(t, handler, good(t, run), config)
	scene.Equal(t, "id that the plugin was told", id, p.ID)
	scene.Equal(t, "state of the pod", p.Status(t).State, cri.PodSandboxState_SANDBOX_READY)
}

// podTakesNoContainer checks that no container can be made in a pod while its RunPodSandbox hook
// runs, and that one can afterwards.
func podTakesNoContainer(t *testing.T, w *scene.World, handler string) {
	config := w.PodConfig(t)
	hook := hold(t, w, "RunPodSandbox", config)
	run := call(func() (string, error) { return runPod(t.Context(), w, handler, config) })
	id := hook.wait(t).Pod.Id
	_, err := w.Runtime().CreateContainer(t.Context(), &cri.CreateContainerRequest{
		PodSandboxId: id, SandboxConfig: config, Config: kubelet.Container("early", images.Probe, scene.Steps("sleep")),
	})
	scene.WantCode(t, err, codes.NotFound, id)
	hook.release()
	p := w.Adopt(t, handler, good(t, run), config)
	p.Start(t, "sleep")
	scene.Equal(t, "number of containers", len(containers(t, p)), 1)
}

// refusedPod checks that RunPodSandbox fails with its hook, leaves nothing, and works when it is
// called again.
func refusedPod(t *testing.T, w *scene.World, handler string) {
	config := w.PodConfig(t)
	first := w.Plugin(t, "10", &nriplugin.Plugin{})
	w.Plugin(t, "20", refuser("RunPodSandbox", config))
	_, err := runPod(t.Context(), w, handler, config)
	scene.WantCode(t, err, codes.PermissionDenied, "refused by this test")
	refused := eventsOf(first, config)[0].Pod.Id
	told(t, first, refused, "RunPodSandbox", "StopPodSandbox", "RemovePodSandbox")
	if slices.Contains(podIDs(t, w), refused) {
		t.Error("the pod that was refused is listed")
	}
	w.Gone(t, refused)
	id, err := runPod(t.Context(), w, handler, config)
	if err != nil {
		t.Fatal(err)
	}
	p := w.Adopt(t, handler, id, config)
	scene.Equal(t, "state of the pod", p.Status(t).State, cri.PodSandboxState_SANDBOX_READY)
}

// podIsStopped checks that the containers of a pod have exited, and the pod can be asked for,
// while its StopPodSandbox hook runs.
func podIsStopped(t *testing.T, w *scene.World, handler string) {
	config := w.PodConfig(t)
	hook := hold(t, w, "StopPodSandbox", config)
	id, err := runPod(t.Context(), w, handler, config)
	if err != nil {
		t.Fatal(err)
	}
	p := w.Adopt(t, handler, id, config)
	p.Start(t, "sleep")
	p.Start(t, "ignore TERM ; sleep")
	stop := call(func() (string, error) {
		_, err := w.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
		return "", err
	})
	hook.wait(t)
	list := containers(t, p)
	scene.Equal(t, "number of containers", len(list), 2)
	for _, c := range list {
		scene.Equal(t, "state of a container", c.State, cri.ContainerState_CONTAINER_EXITED)
	}
	scene.Equal(t, "state of the pod", p.Status(t).State, cri.PodSandboxState_SANDBOX_NOTREADY)
	hook.release()
	good(t, stop)
}

// containerIsHidden checks that neither a list nor a status shows a container while its
// CreateContainer hook runs.
func containerIsHidden(t *testing.T, w *scene.World, handler string) {
	p := w.Pod(t, handler)
	hook := hold(t, w, "CreateContainer", p.Config)
	create := call(func() (string, error) {
		c, err := p.Try(t.Context(), "sleep")
		if err != nil {
			return "", err
		}
		return c.ID, nil
	})
	id := hook.wait(t).Container.Id
	scene.Equal(t, "number of containers", len(containers(t, p)), 0)
	_, err := w.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: id})
	scene.WantCode(t, err, codes.NotFound)
	hook.release()
	scene.Equal(t, "id that the plugin was told", id, good(t, create))
	list := containers(t, p)
	if len(list) != 1 || list[0].Id != id || list[0].State != cri.ContainerState_CONTAINER_CREATED {
		t.Errorf("containers after the hook: %v", list)
	}
}

// refusedContainer checks that CreateContainer fails with its hook, leaves nothing, and works
// when it is called again.
func refusedContainer(t *testing.T, w *scene.World, handler string) {
	p := w.Pod(t, handler)
	first := w.Plugin(t, "10", &nriplugin.Plugin{})
	w.Plugin(t, "20", refuser("CreateContainer", p.Config))
	p.Untouched(t, func() {
		_, err := p.Try(t.Context(), "sleep")
		if err == nil {
			t.Fatal("the container was created")
		}
		scene.WantCode(t, err, codes.PermissionDenied, "refused by this test")
	})
	refused := eventsOf(first, p.Config)[0].Container.Id
	told(t, first, refused, "CreateContainer", "StopContainer", "RemoveContainer")
	w.Gone(t, refused)
	scene.Equal(t, "number of containers", len(containers(t, p)), 0)
	p.Start(t, "sleep").Stop(t, 0)
}

// refuser is a plugin that refuses an event of a pod once.
func refuser(event string, pod *cri.PodSandboxConfig) *nriplugin.Plugin {
	refuse := nriplugin.Refuse(event, 1)
	return &nriplugin.Plugin{Answer: func(e nriplugin.Event) error {
		if e.Pod.Uid != pod.Metadata.Uid {
			return nil
		}
		return refuse(e)
	}}
}

// eventsOf are those of a pod and its containers that a plugin was told of.
func eventsOf(plugin *nriplugin.Plugin, pod *cri.PodSandboxConfig) []nriplugin.Event {
	return slices.DeleteFunc(plugin.Events(""), func(e nriplugin.Event) bool { return e.Pod.Uid != pod.Metadata.Uid })
}

func podIDs(t *testing.T, w *scene.World) (ids []string) {
	t.Helper()
	resp, err := w.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range resp.Items {
		ids = append(ids, p.Id)
	}
	return ids
}

func containers(t *testing.T, p *scene.Pod) []*cri.Container {
	t.Helper()
	resp, err := p.World.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.ID}})
	if err != nil {
		t.Fatal(err)
	}
	return resp.Containers
}
