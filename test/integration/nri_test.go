package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/hangfs"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/wait"
)

// plugin connects a plugin to the node and waits until it is told of events.
func (w *world) plugin(t *testing.T, index string, p *nriplugin.Plugin) *nriplugin.Plugin {
	t.Helper()
	name := "p" + index
	if err := p.Connect(t.Context(), w.Path("nri.sock"), index, name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	wait.For(t, "the plugin to be connected", func() bool {
		out, err := w.crius(t, "status")
		return err == nil && strings.Contains(out, index+"-"+name)
	})
	return p
}

// ids are those that the lists show.
func (w *world) ids(ctx context.Context) (pods, containers []string, err error) {
	p, err := w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, nil, err
	}
	for _, pod := range p.Items {
		pods = append(pods, pod.Id)
	}
	c, err := w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return nil, nil, err
	}
	for _, container := range c.Containers {
		containers = append(containers, container.Id)
	}
	return pods, containers, nil
}

func TestPluginEventsInOrder(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	plugin := w.plugin(t, "10", &nriplugin.Plugin{})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler, func(c *cri.PodSandboxConfig) { c.Labels = map[string]string{"app": "x"} })
		c := p.start(t, "sleep", func(c *cri.ContainerConfig) { c.Annotations = map[string]string{"note": "y"} })
		_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
			ContainerId: c.id, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: 64 * mib},
		})
		must(t, err)
		c.stop(t, 0)
		failed := p.start(t, "exit 7")
		failed.wait(t)
		wait.For(t, "the end of the container to be told", func() bool { return slices.Contains(plugin.Names(failed.id), "StopContainer") })
		p.stop(t)
		p.stop(t)
		p.remove(t)

		born := []string{"CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer"}
		equalSlices(t, "told of the pod", plugin.Names(p.id), []string{"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"})
		equalSlices(t, "told of a container that was stopped", plugin.Names(c.id),
			append(slices.Clone(born), "UpdateContainer", "PostUpdateContainer", "StopContainer", "RemoveContainer"))
		equalSlices(t, "told of a container that failed", plugin.Names(failed.id), append(slices.Clone(born), "StopContainer", "RemoveContainer"))

		pod := plugin.Events(p.id)[0].Pod
		meta := p.config.Metadata
		if pod.Name != meta.Name || pod.Namespace != meta.Namespace || pod.Uid != meta.Uid || pod.Labels["app"] != "x" || pod.RuntimeHandler != handler || len(pod.Ips) == 0 {
			t.Errorf("pod is described as %v", pod)
		}
		if !slices.ContainsFunc(pod.Linux.Namespaces, func(n *api.LinuxNamespace) bool { return n.Type == "network" && n.Path != "" }) {
			t.Errorf("namespaces of the pod: %v", pod.Linux.Namespaces)
		}
		events := plugin.Events(c.id)
		if got := events[0].Container; got.Name != "c1" || got.PodSandboxId != p.id || got.Annotations["note"] != "y" || len(got.Args) == 0 || len(got.Mounts) == 0 {
			t.Errorf("container is described as %v", got)
		}
		if got := events[3].Container; got.State != api.ContainerState_CONTAINER_RUNNING || got.Pid == 0 {
			t.Errorf("a container that runs is described as %v, pid %d", got.State, got.Pid)
		}
		if got := plugin.Events(failed.id)[4].Container; got.State != api.ContainerState_CONTAINER_STOPPED || got.ExitCode != 7 {
			t.Errorf("a container that failed is described as %v, code %d", got.State, got.ExitCode)
		}
	})
}

// What is being asked about is in no list and takes no container; what is being
// stopped is still there, without containers that run.
func TestPluginsSeeNothingTooEarly(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	ctx := t.Context()
	var faults atomic.Pointer[error]
	complain := func(format string, args ...any) { faults.Store(new(fmt.Errorf(format, args...))) }
	w.plugin(t, "10", &nriplugin.Plugin{Answer: func(e nriplugin.Event) error {
		pods, containers, err := w.ids(ctx)
		if err != nil {
			complain("%w", err)
		}
		switch e.Name {
		case "RunPodSandbox":
			if slices.Contains(pods, e.Pod.Id) {
				complain("the pod is listed while its RunPodSandbox is asked for")
			}
			if _, err := w.Runtime().CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: e.Pod.Id, Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "early"}}}); err == nil {
				complain("a pod that is not there took a container")
			}
		case "CreateContainer":
			if slices.Contains(containers, e.Container.Id) {
				complain("the container is listed while its CreateContainer is asked for")
			}
		case "PostCreateContainer":
			if !slices.Contains(containers, e.Container.Id) {
				complain("the container is not listed after its creation")
			}
		case "StopPodSandbox":
			status, err := w.Runtime().PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: e.Pod.Id})
			if err != nil || status.Status.State != cri.PodSandboxState_SANDBOX_NOTREADY {
				complain("a pod that is being stopped is %v, %w", status, err)
			}
			running, err := w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
				PodSandboxId: e.Pod.Id, State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING},
			}})
			if err != nil || len(running.Containers) > 0 {
				complain("containers run while StopPodSandbox is told: %v, %w", running, err)
			}
		}
		return nil
	}})
	p := w.run(t, "runc")
	p.start(t, "sleep")
	p.stop(t)
	p.remove(t)
	if fault := faults.Load(); fault != nil {
		t.Error(*fault)
	}
}

// A verb that a plugin refuses fails and leaves nothing, and the retry works.
func TestPluginRefuses(t *testing.T) {
	t.Parallel()
	for _, event := range []string{"RunPodSandbox", "CreateContainer"} {
		t.Run(event, func(t *testing.T) {
			t.Parallel()
			w := spotless(t, node.Options{})
			plugin := w.plugin(t, "10", &nriplugin.Plugin{})
			w.plugin(t, "20", &nriplugin.Plugin{Answer: nriplugin.Refuse(event, 1)})
			config := w.podConfig(t)
			resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
			if event == "RunPodSandbox" {
				wantCode(t, err, codes.PermissionDenied, "refused by this test")
				refused := plugin.Events("")[0].Pod.Id
				equalSlices(t, "told of the pod that was refused", plugin.Names(refused), []string{"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"})
				w.Gone(t, refused)
				resp, err = w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
			}
			must(t, err)
			p := &pod{w: w, id: resp.PodSandboxId, config: config, made: []string{resp.PodSandboxId}}
			if event == "CreateContainer" {
				_, err := p.try(t.Context(), steps("sleep"))
				wantCode(t, err, codes.PermissionDenied, "refused by this test")
				events := plugin.Events("")
				refused := events[len(events)-1].Container.Id
				equalSlices(t, "told of the container that was refused", plugin.Names(refused), []string{"CreateContainer", "StopContainer", "RemoveContainer"})
				w.Gone(t, refused)
			}
			p.start(t, "sleep")
			p.vanish(t)
			w.Restored(t, w.empty)
		})
	}
}

// A start that a plugin refuses ends the container, as one that the runtime refuses.
func TestPluginRefusesStart(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	w.plugin(t, "10", &nriplugin.Plugin{Answer: nriplugin.Refuse("StartContainer", 1)})
	p := w.run(t, "crun")
	c := p.create(t, "sleep")
	_, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
	wantCode(t, err, codes.PermissionDenied, "refused by this test")
	s := c.status(t)
	equal(t, "reason", s.Reason, "StartError")
	equal(t, "state", s.State, cri.ContainerState_CONTAINER_EXITED)
	p.start(t, "sleep")
}

func TestPluginAdjustsContainers(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	w.plugin(t, "10", &nriplugin.Plugin{Create: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		a := &api.ContainerAdjustment{}
		a.AddEnv("FROM_PLUGIN", "yes")
		a.RemoveEnv("PLUGIN_REMOVES")
		a.AddMount(&api.Mount{Source: "/etc/hostname", Destination: "/from-plugin/name", Type: "bind", Options: []string{"bind", "ro"}})
		a.AddRlimit("RLIMIT_NOFILE", 345, 234)
		a.SetLinuxMemoryLimit(96 * mib)
		a.SetLinuxCPUShares(512)
		a.SetLinuxOomScoreAdj(new(321))
		a.AddDevice(&api.LinuxDevice{Path: "/dev/from-plugin", Type: "c", Major: 1, Minor: 3})
		return a, nil, nil
	}})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "sleep", func(c *cri.ContainerConfig) { c.Envs = []*cri.KeyValue{{Key: "PLUGIN_REMOVES", Value: []byte("this")}} })
		environ := c.procfs(t, "environ")
		if !strings.Contains(environ, "FROM_PLUGIN=yes") || strings.Contains(environ, "PLUGIN_REMOVES") {
			t.Errorf("environment %q", environ)
		}
		if mounts := c.procfs(t, "mountinfo"); !strings.Contains(mounts, " /from-plugin/name ro") {
			t.Errorf("no mount of the plugin in\n%s", mounts)
		}
		limits := c.procfs(t, "limits") // the soft one Go raises by itself
		equal(t, "hard limit of open files", strings.Fields(limits[strings.Index(limits, "Max open files"):])[4], "345")
		equal(t, "oom_score_adj", c.procfs(t, "oom_score_adj"), "321")
		c.holds(t, memoryLimit, strconv.Itoa(96*mib), strconv.Itoa(96*mib))
		c.holds(t, cpuShares, "512", "20")
		inForce := c.status(t).Resources.GetLinux()
		equal(t, "memory limit in the status", inForce.GetMemoryLimitInBytes(), 96*mib)
		equal(t, "CPU shares in the status", inForce.GetCpuShares(), 512)
	})
	p := w.run(t, "crun")
	c := p.start(t, "sleep")
	must(t, w.Restart(t.Context()))
	equal(t, "memory limit in the status after a restart", c.status(t).Resources.GetLinux().GetMemoryLimitInBytes(), 96*mib)
}

// A plugin changes an update, refuses one, and asks for one on its own.
func TestPluginAndUpdates(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	limit := func(id string, bytes int64) *api.ContainerUpdate {
		u := &api.ContainerUpdate{}
		u.SetContainerId(id)
		u.SetLinuxMemoryLimit(bytes)
		return u
	}
	plugin := w.plugin(t, "10", &nriplugin.Plugin{Update: func(c *api.Container, r *api.LinuxResources) ([]*api.ContainerUpdate, error) {
		asked := r.GetMemory().GetLimit().GetValue()
		if asked > 100*mib {
			return nil, errors.New("too much for this test")
		}
		return []*api.ContainerUpdate{limit(c.Id, asked+mib)}, nil
	}})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "sleep")
		update := func(bytes int64) error {
			_, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
				ContainerId: c.id, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: bytes},
			})
			return err
		}
		must(t, update(64*mib))
		c.holds(t, memoryLimit, strconv.Itoa(65*mib), strconv.Itoa(65*mib))
		equal(t, "memory limit in the status", c.status(t).Resources.GetLinux().GetMemoryLimitInBytes(), 65*mib)
		wantCode(t, update(200*mib), codes.PermissionDenied, "too much for this test")
		c.holds(t, memoryLimit, strconv.Itoa(65*mib), strconv.Itoa(65*mib))

		failed, err := plugin.Ask(limit(c.id, 80*mib), limit("unknown", mib))
		must(t, err)
		if len(failed) != 1 || failed[0].ContainerId != "unknown" {
			t.Errorf("failed: %v", failed)
		}
		c.holds(t, memoryLimit, strconv.Itoa(80*mib), strconv.Itoa(80*mib))
		equal(t, "memory limit in the status", c.status(t).Resources.GetLinux().GetMemoryLimitInBytes(), 80*mib)
	})
}

// A plugin that comes late is told of all there is, and hears of all that comes
// while it is told; so is one that comes back after the server.
func TestLatePluginMissesNothing(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	before := w.run(t, "runc")
	running := before.start(t, "sleep")
	ended := before.start(t, "exit 0")
	ended.wait(t)

	p := w.run(t, "crun")
	var plugins []*nriplugin.Plugin
	var creators sync.WaitGroup
	made := make([][]string, 3)
	for i := range made {
		creators.Go(func() {
			for j := range 6 {
				config := fmt.Sprintf("churn-%d-%d", i, j)
				resp, err := w.Runtime().CreateContainer(t.Context(), &cri.CreateContainerRequest{
					PodSandboxId: p.id, SandboxConfig: p.config,
					Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: config}, Image: &cri.ImageSpec{Image: probe}, Args: []string{"sleep"}},
				})
				if err != nil {
					t.Error(err)
					return
				}
				made[i] = append(made[i], resp.ContainerId)
			}
		})
	}
	for _, index := range []string{"10", "20", "30"} {
		plugins = append(plugins, w.plugin(t, index, &nriplugin.Plugin{}))
	}
	creators.Wait()
	for _, id := range slices.Concat(made...) {
		p.made = append(p.made, id)
		for i, plugin := range plugins {
			if !plugin.Knows(id) {
				t.Errorf("plugin %d has not heard of container %s", i, id)
			}
		}
	}
	pods, containers := plugins[0].Synchronized()
	if !slices.ContainsFunc(pods, func(pod *api.PodSandbox) bool { return pod.Id == before.id }) {
		t.Errorf("pods there were: %v", pods)
	}
	state := map[string]api.ContainerState{}
	for _, c := range containers {
		state[c.Id] = c.State
	}
	equal(t, "state of the container that runs", state[running.id], api.ContainerState_CONTAINER_RUNNING)
	if _, told := state[ended.id]; told {
		t.Error("told of a container that has ended")
	}

	must(t, w.Crash(t.Context()))
	again := w.plugin(t, "40", &nriplugin.Plugin{})
	if !again.Knows(before.id) || !again.Knows(running.id) {
		t.Error("after a crash of the server the plugin does not know what runs")
	}
}

// While the volume of a container does not answer, plugins connect and others are created:
// plugins are asked about a container when its volumes are there.
func TestVolumeThatHangsHoldsUpNoPlugin(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	point := filepath.Join(t.TempDir(), "point")
	must(t, os.Mkdir(point, 0o700))
	volume, err := hangfs.Mount(point)
	must(t, err)
	t.Cleanup(func() { must(t, volume.Release()) })
	volume.Hang()
	p := w.run(t, "runc")
	waits := make(chan error, 1)
	go func() {
		_, err := p.try(t.Context(), steps("sleep"), func(c *cri.ContainerConfig) {
			c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: "/v", HostPath: point})
		})
		waits <- err
	}()
	wait.For(t, "the volume to be looked at", func() bool { return volume.Waiting() > 0 })
	plugin := w.plugin(t, "10", &nriplugin.Plugin{})
	c := w.run(t, "runc").start(t, "sleep")
	if !plugin.Knows(c.id) {
		t.Error("the plugin has not heard of the other container")
	}
	select {
	case err := <-waits:
		t.Errorf("the container with the volume was done first: %v", err)
	default:
	}
	must(t, volume.Release())
	<-waits
}

// A plugin that hangs costs a verb no more than its time, and is dropped.
func TestHangingPluginIsDropped(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[nri]\nrequest_timeout = \"1s\"\n"})
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	plugin := w.plugin(t, "10", &nriplugin.Plugin{Answer: func(e nriplugin.Event) error {
		if e.Name == "CreateContainer" {
			<-hang
		}
		return nil
	}})
	p := w.run(t, "runc")
	p.start(t, "sleep")
	<-plugin.Closed()
	p.start(t, "sleep")
	out, err := w.crius(t, "status")
	must(t, err)
	if !strings.Contains(out, "10-p10") || !strings.Contains(out, "deadline exceeded") {
		t.Errorf("status does not tell of the plugin's end:\n%s", out)
	}
}

// A node whose socket is another runtime's does without plugins, and says so.
func TestNodeWithoutPluginSocket(t *testing.T) {
	t.Parallel()
	first := private(t, node.Options{})
	second := private(t, node.Options{Config: "[nri]\nsocket = \"" + first.Path("nri.sock") + "\"\n"})
	second.run(t, "runc").start(t, "sleep")
	out, err := second.crius(t, "status")
	must(t, err)
	if !strings.Contains(out, "another runtime listens on "+first.Path("nri.sock")) {
		t.Errorf("status does not say why there are no plugins:\n%s", out)
	}
	first.plugin(t, "10", &nriplugin.Plugin{})
}
