package main_test

import (
	"fmt"
	"testing"

	"github.com/containerd/nri/pkg/api"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// pluginIsTold checks that a plugin which connects gets the pods and containers that are
// there, and events of those that come.
func pluginIsTold(t *testing.T, w *scene.World, handler string) {
	p := w.Pod(t, handler)
	before := p.Start(t, "sleep")
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{})
	after := p.Start(t, "sleep")
	for _, id := range []string{p.ID, before.ID, after.ID} {
		scene.Equal(t, "times that the plugin was told of "+id, plugin.Introduced(id), 1)
	}
	_, containers := plugin.Synchronized()
	for _, c := range containers {
		if c.Id == before.ID && c.State != api.ContainerState_CONTAINER_RUNNING {
			t.Errorf("the container that runs is described as %v", c.State)
		}
	}
	told(t, plugin, before.ID)
	told(t, plugin, after.ID, "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer")
}

// containerDuringSynchronize checks that a plugin does not miss a container that is made while
// the plugin is told what exists.
func containerDuringSynchronize(t *testing.T, w *scene.World, handler string) {
	latePlugin(t, w.Pod(t, handler), 0, 1, 0)
}

// containersAroundSynchronize checks that a plugin is told once of every container that is made
// before, while and after the plugin is told what exists.
func containersAroundSynchronize(t *testing.T, w *scene.World, handler string) {
	latePlugin(t, w.Pod(t, handler), 2, 3, 2)
}

// latePlugin connects a plugin to a pod's node while containers are made: so many before,
// during and after the time in which the plugin is told what exists.
func latePlugin(t *testing.T, p *scene.Pod, before, during, after int) {
	t.Helper()
	w := p.World
	w.Plugin(t, "10", &nriplugin.Plugin{}) // without one, nobody is asked
	var ids []string
	for range before {
		ids = append(ids, p.Start(t, "sleep").ID)
	}
	goOn := make(chan struct{})
	plugin := w.Plugin(t, "20", &nriplugin.Plugin{Sync: func([]*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
		<-goOn
		return nil, nil
	}})
	made := make(chan answer, during)
	for i := range during {
		config := kubelet.Container(fmt.Sprintf("during-%d", i), images.Probe, scene.Steps("sleep"))
		go func() {
			resp, err := w.Runtime().CreateContainer(t.Context(), &cri.CreateContainerRequest{PodSandboxId: p.ID, SandboxConfig: p.Config, Config: config})
			made <- answer{resp.GetContainerId(), err}
		}()
	}
	wait.For(t, "the containers to be begun", func() bool { return w.InStep(t, "call NRI plugins")+len(made) == during })
	close(goOn)
	for range during {
		ids = append(ids, p.Adopt(good(t, made), nil).ID)
	}
	for range after {
		ids = append(ids, p.Start(t, "sleep").ID)
	}
	for _, id := range ids {
		scene.Equal(t, "times that the plugin was told of "+id, plugin.Introduced(id), 1)
	}
}
