package integration

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/wait"
)

// Pods come and go, several at once, and so do plugins. A plugin that stays
// receives every event, in order. One that connects late receives everything
// that runs once, and every event from then on.
func TestPluginsUnderChurn(t *testing.T) {
	t.Parallel()
	const pods, atOnce, latecomers = 50, 5, 8
	w := private(t, node.Options{})
	first := w.Plugin(t, "10", &nriplugin.Plugin{})
	lives, ctx := errgroup.WithContext(t.Context())
	lives.SetLimit(atOnce)
	ended := make(chan error, 1)
	go func() {
		for i := range pods {
			lives.Go(func() error { return w.brief(ctx, fmt.Sprintf("churn-%d", i), handlers[i%2]) })
		}
		ended <- lives.Wait()
	}()
	var late []*latecomer
	for i := range latecomers {
		before := len(first.Events(""))
		wait.For(t, "pods to go on", func() bool { return len(first.Events("")) > before+20 || len(ended) > 0 })
		l := w.latecomer(t, fmt.Sprint(20+i), first)
		late = append(late, l)
		if i%2 == 0 {
			wait.For(t, "the plugin to have received something", func() bool { return len(l.Events("")) > 10 || len(ended) > 0 })
			l.Close()
		}
	}
	must(t, <-ended)

	all := first.Events("")
	inOrder(t, first, all, pods)
	for i, l := range late {
		stayed := i%2 == 1
		l.check(t, all, stayed)
	}
}

// brief is a pod with a container that is stopped.
func (w *world) brief(ctx context.Context, name, handler string) error {
	config := kubelet.Pod(name)
	r := w.Runtime()
	p, err := r.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	if err != nil {
		return err
	}
	container := kubelet.Container("c", probe, steps("sleep"))
	container.LogPath = ""
	c, err := r.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: p.PodSandboxId, SandboxConfig: config, Config: container})
	if err != nil {
		return err
	}
	if _, err := r.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
		return err
	}
	if _, err := r.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.PodSandboxId}); err != nil {
		return err
	}
	_, err = r.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.PodSandboxId})
	return err
}

// inOrder checks that a plugin has received all events of that many pods.
func inOrder(t *testing.T, plugin *nriplugin.Plugin, all []nriplugin.Event, pods int) {
	t.Helper()
	ran, created := 0, 0
	for _, e := range all {
		switch e.Name {
		case "RunPodSandbox":
			ran++
			equalSlices(t, "told of a pod", plugin.Names(e.Pod.Id), []string{"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"})
		case "CreateContainer":
			created++
			equalSlices(t, "told of a container", plugin.Names(e.Container.Id), []string{
				"CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer", "StopContainer", "RemoveContainer",
			})
		}
	}
	equal(t, "number of pods", ran, pods)
	equal(t, "number of containers", created, pods)
}

// latecomer is a plugin that connects while pods come and go.
type latecomer struct {
	*nriplugin.Plugin
	from    int      // events sent to the first plugin before
	running []string // what was listed as running then
}

// latecomer connects one. While it is being synchronized, no plugin receives an
// event.
func (w *world) latecomer(t *testing.T, index string, first *nriplugin.Plugin) *latecomer {
	t.Helper()
	l := &latecomer{Plugin: &nriplugin.Plugin{}}
	noted := make(chan error, 1)
	l.Sync = func([]*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
		l.from = len(first.Events(""))
		list, err := w.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{
			Filter: &cri.ContainerFilter{State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}},
		})
		for _, c := range list.GetContainers() {
			l.running = append(l.running, c.Id)
		}
		noted <- err
		return nil, nil
	}
	w.Plugin(t, index, l.Plugin)
	must(t, <-noted)
	return l
}

// check compares what the plugin has received with everything that the first
// one has received.
func (l *latecomer) check(t *testing.T, all []nriplugin.Event, stayed bool) {
	t.Helper()
	_, synced := l.Synchronized()
	for _, id := range l.running {
		if !slices.ContainsFunc(synced, func(c *api.Container) bool { return c.Id == id }) {
			t.Errorf("container %s ran when the plugin came, and it was not told", id)
		}
	}
	got, want := signs(l.Events("")), signs(all[l.from:])
	if !stayed {
		want = want[:min(len(got), len(want))]
	}
	equalSlices(t, "told of a plugin that came late", got, want)
	for _, e := range all {
		id := e.Pod.Id
		if e.Container != nil {
			id = e.Container.Id
		}
		if n := l.Introduced(id); n > 1 {
			t.Errorf("the plugin was told %d times that %s is there", n, id)
		}
	}
}

// signs returns the names of events with the object of each.
func signs(events []nriplugin.Event) []string {
	var signs []string
	for _, e := range events {
		signs = append(signs, e.Name+" "+e.Pod.Id+" "+e.Container.GetId())
	}
	return signs
}
