package main_test

import (
	"slices"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// podEvents checks that plugins are told of a pod in strict order, with what it is.
func podEvents(t *testing.T, w *scene.World, handler string) {
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{})
	p := w.Pod(t, handler, labelled)
	p.Stop(t)
	p.Remove(t)
	told(t, plugin, p.ID, "RunPodSandbox", "StopPodSandbox", "RemovePodSandbox")
	for _, e := range plugin.Events(p.ID) {
		pod, want := e.Pod, p.Config.Metadata
		if pod.Name != want.Name || pod.Namespace != want.Namespace || pod.Uid != want.Uid || pod.Labels["app"] != "x" || pod.RuntimeHandler != handler {
			t.Errorf("%s describes the pod as %v", e.Name, pod)
		}
	}
	run := plugin.Events(p.ID)[0].Pod
	inNetwork := func(n *api.LinuxNamespace) bool { return n.Type == "network" && n.Path != "" }
	if len(run.Ips) == 0 || !slices.ContainsFunc(run.Linux.Namespaces, inNetwork) {
		t.Errorf("the pod has the addresses %v and the namespaces %v", run.Ips, run.Linux.Namespaces)
	}
}

// containerEvents checks the same of a container that is stopped.
func containerEvents(t *testing.T, w *scene.World, handler string) {
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{})
	p := w.Pod(t, handler)
	c := p.Start(t, "sleep", noted)
	c.Stop(t, 0)
	c.Remove(t)
	told(t, plugin, c.ID, "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer", "StopContainer", "RemoveContainer")
	describes(t, plugin, c)
	running := plugin.Events(c.ID)[3].Container
	scene.Equal(t, "state of the container that runs", running.State, api.ContainerState_CONTAINER_RUNNING)
	if running.Pid == 0 || len(running.Args) == 0 || len(running.Mounts) == 0 {
		t.Errorf("the container that runs is described as %v", running)
	}
}

// failedContainerEvents checks the same of a container that fails: its end is told at once,
// and not with its removal.
func failedContainerEvents(t *testing.T, w *scene.World, handler string) {
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{})
	p := w.Pod(t, handler)
	c := p.Start(t, "exit 7", noted)
	c.Wait(t)
	wait.For(t, "the plugin to be told of the end", func() bool { return slices.Contains(plugin.Names(c.ID), "StopContainer") })
	told(t, plugin, c.ID, "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer", "StopContainer")
	c.Remove(t)
	told(t, plugin, c.ID, "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer", "StopContainer", "RemoveContainer")
	describes(t, plugin, c)
	stopped := plugin.Events(c.ID)[4].Container
	scene.Equal(t, "state of the container that failed", stopped.State, api.ContainerState_CONTAINER_STOPPED)
	scene.Equal(t, "its exit code", stopped.ExitCode, 7)
}

// podStopsOnce checks that a pod is stopped once, however often StopPodSandbox is called,
// and then takes no container, of which no plugin is told either.
func podStopsOnce(t *testing.T, w *scene.World, handler string) {
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{})
	p := w.Pod(t, handler)
	p.Stop(t)
	p.Stop(t)
	_, err := p.Try(t.Context(), "sleep")
	scene.WantCode(t, err, codes.FailedPrecondition)
	told(t, plugin, p.ID, "RunPodSandbox", "StopPodSandbox")
	if slices.ContainsFunc(plugin.Events(""), func(e nriplugin.Event) bool { return e.Container.GetPodSandboxId() == p.ID }) {
		t.Error("the plugin was told of a container in the stopped pod")
	}
}

func labelled(c *cri.PodSandboxConfig) { c.Labels["app"] = "x" }

func noted(c *cri.ContainerConfig) { c.Annotations["note"] = "y" }

// told checks what a plugin was told of a pod or container so far.
func told(t *testing.T, plugin *nriplugin.Plugin, id string, want ...string) {
	t.Helper()
	if got := plugin.Names(id); !slices.Equal(got, want) {
		t.Errorf("the plugin was told %q, want %q", got, want)
	}
}

// describes checks that all events of a container, made with noted, say whose they are.
func describes(t *testing.T, plugin *nriplugin.Plugin, c *scene.Container) {
	t.Helper()
	for _, e := range plugin.Events(c.ID) {
		if got := e.Container; got.Name != c.Config.Metadata.Name || got.PodSandboxId != c.Pod.ID || got.Annotations["note"] != "y" || e.Pod.Id != c.Pod.ID {
			t.Errorf("%s describes the container as %v in %v", e.Name, got, e.Pod)
		}
	}
}
