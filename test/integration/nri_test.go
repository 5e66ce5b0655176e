package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/hangfs"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/wait"
)

// A start that a plugin refuses ends the container, like one that the runtime
// refuses.
func TestPluginRefusesStart(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	w.Plugin(t, "10", &nriplugin.Plugin{Answer: nriplugin.Refuse("StartContainer", 1)})
	p := w.run(t, "crun")
	c := p.create(t, "sleep")
	_, err := w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
	wantCode(t, err, codes.PermissionDenied, "refused by this test")
	s := c.status(t)
	equal(t, "reason", s.Reason, "StartError")
	equal(t, "state", s.State, cri.ContainerState_CONTAINER_EXITED)
	p.start(t, "sleep")
}

// When plugins are notified that a container was created, it is listed.
func TestContainerIsListedBeforePostCreate(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	asked := make(chan error, 1)
	w.Plugin(t, "10", &nriplugin.Plugin{Answer: func(e nriplugin.Event) error {
		if e.Name == "PostCreateContainer" {
			_, err := w.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: e.Container.Id})
			asked <- err
		}
		return nil
	}})
	w.run(t, "crun").create(t, "sleep")
	must(t, <-asked)
}

// All adjustments of a plugin take effect with every runtime, and after a
// restart of the server.
func TestPluginAdjustsEverything(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	hooked := filepath.Join(t.TempDir(), "hooked")
	w.Plugin(t, "10", &nriplugin.Plugin{Create: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		a := nriplugin.Everything()
		a.AddHooks(&api.Hooks{Poststop: []*api.Hook{{Path: "/bin/touch", Args: []string{"touch", hooked}}}})
		a.SetArgs([]string{"/probe", "sleep"})
		return a, nil, nil
	}})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		c := p.start(t, "exit 1", func(c *cri.ContainerConfig) { c.Envs = []*cri.KeyValue{{Key: "PLUGIN_REMOVES", Value: []byte("this")}} })
		environ := c.procfs(t, "environ")
		if !strings.Contains(environ, "FROM_PLUGIN=yes") || strings.Contains(environ, "PLUGIN_REMOVES") {
			t.Errorf("environment %q", environ)
		}
		if mounts := c.procfs(t, "mountinfo"); !strings.Contains(mounts, " /from-plugin/name ro") || strings.Contains(mounts, " /dev/mqueue ") {
			t.Errorf("no mount of the plugin, or one that it has removed, in\n%s", mounts)
		}
		limits := c.procfs(t, "limits") // Go raises the soft limit by itself
		equal(t, "hard limit of open files", strings.Fields(limits[strings.Index(limits, "Max open files"):])[4], strconv.Itoa(nriplugin.OpenFiles))
		equal(t, "oom_score_adj", c.procfs(t, "oom_score_adj"), "321")
		equal(t, "sysctl", strings.TrimSpace(c.exec(t, "cat /proc/sys/net/ipv4/ip_unprivileged_port_start")), "17")
		if devices := c.exec(t, "ls /dev"); !strings.Contains(devices, "from-plugin") {
			t.Errorf("no device of the plugin among %q", devices)
		}
		adjusted(t, c)
		c.stop(t, 0)
		c.remove(t)
		must(t, os.Remove(hooked))
	})
	c := w.run(t, "crun").start(t, "exit 1")
	must(t, w.Restart(t.Context()))
	adjusted(t, c)
}

// adjusted checks that limits of Everything are in force, and in the status.
func adjusted(t *testing.T, c *container) {
	t.Helper()
	limit := strconv.Itoa(nriplugin.MemoryLimit)
	c.holds(t, memoryLimit, limit, limit)
	c.holds(t, cpuShares, "512", "20")
	c.holds(t, cpuQuota, "200000", "200000 100000")
	inForce := c.status(t).Resources.GetLinux()
	equal(t, "memory limit in the status", inForce.GetMemoryLimitInBytes(), nriplugin.MemoryLimit)
	equal(t, "CPU shares in the status", inForce.GetCpuShares(), nriplugin.CPUShares)
	equal(t, "CPU quota in the status", inForce.GetCpuQuota(), 200_000)
}

// A plugin changes an update, refuses one, and requests one of its own, also while another update is
// under way (containerd/containerd#13733).
func TestPluginAndUpdates(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	limit := func(id string, bytes int64) *api.ContainerUpdate {
		u := &api.ContainerUpdate{}
		u.SetContainerId(id)
		u.SetLinuxMemoryLimit(bytes)
		return u
	}
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{Update: func(c *api.Container, r *api.LinuxResources) ([]*api.ContainerUpdate, error) {
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
		equalSlices(t, "told of the container", plugin.Names(c.id)[4:], []string{"UpdateContainer", "PostUpdateContainer"})
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

		var both errgroup.Group // of the kubelet and of the plugin at once
		for n := range int64(10) {
			both.Go(func() error { return update((64 + n) * mib) })
			both.Go(func() error {
				if failed, err := plugin.Ask(limit(c.id, (80+n)*mib)); err != nil || len(failed) > 0 {
					return fmt.Errorf("%v failed: %w", failed, err)
				}
				return nil
			})
		}
		must(t, both.Wait())
	})
}

// A plugin that connects after a server was killed receives what runs, and not
// what has ended.
func TestPluginAfterCrash(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, "runc")
	running := p.start(t, "sleep")
	ended := p.start(t, "exit 0")
	ended.wait(t)
	must(t, w.Crash(t.Context()))
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{})
	for id, times := range map[string]int{p.id: 1, running.id: 1, ended.id: 0} {
		equal(t, "times that the plugin was told of "+id, plugin.Introduced(id), times)
	}
	p.stop(t)
	p.remove(t)
	equalSlices(t, "events of the pod", plugin.Names(p.id), []string{"StopPodSandbox", "RemovePodSandbox"})
}

// While the volume of a container does not answer, plugins connect and other
// containers are created: plugins are asked about a container only once its
// volumes are mounted.
func TestVolumeThatHangsHoldsUpNoPlugin(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p, other := w.run(t, "runc"), w.run(t, "runc")
	wait.Retry(t, func() error { // the server waits for a volume for half a minute
		point := filepath.Join(t.TempDir(), "point")
		must(t, os.Mkdir(point, 0o700))
		volume, err := hangfs.Mount(point)
		must(t, err)
		t.Cleanup(func() { must(t, volume.Release()) })
		volume.Hang()
		waits := make(chan error, 1)
		go func() {
			_, err := p.try(t.Context(), steps("sleep"), func(c *cri.ContainerConfig) {
				c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: "/v", HostPath: point})
			})
			waits <- err
		}()
		wait.For(t, "the volume to be looked at", func() bool { return volume.Waiting() > 0 })
		plugin := w.Plugin(t, "10", &nriplugin.Plugin{})
		defer plugin.Close()
		c := other.start(t, "sleep")
		late := len(waits) > 0
		if !plugin.Knows(c.id) {
			t.Error("the plugin has not heard of the other container")
		}
		must(t, volume.Release())
		if err := <-waits; late {
			return fmt.Errorf("the container with the volume was done first: %v", err)
		}
		return nil
	})
}

// A hanging plugin costs a verb no more than the time limit, and is dropped.
func TestHangingPluginIsDropped(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{Config: "[nri]\nrequest_timeout = \"1s\"\n"})
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{Answer: func(e nriplugin.Event) error {
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

// A node whose socket belongs to another runtime runs without plugins, and
// reports that.
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
	first.Plugin(t, "10", &nriplugin.Plugin{})
}

// What a plugin adds at the creation is shown to plugins as long as the container lives, also by
// another server. A pod that is removed still has the addresses of its life, and names no
// namespace that is gone. The status names the handler that was asked for: none.
func TestPluginsSeeWhatWasAdded(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	const key, value = "example.com/added", "by the plugin"
	create := func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		a := &api.ContainerAdjustment{}
		a.AddAnnotation(key, value)
		a.RemoveAnnotation("example.com/removed")
		return a, nil, nil
	}
	first := w.Plugin(t, "10", &nriplugin.Plugin{Create: create})
	p := w.run(t, "")
	equal(t, "handler in the status", p.status(t).RuntimeHandler, "")
	c := p.start(t, "sleep", func(c *cri.ContainerConfig) {
		c.Annotations = map[string]string{"example.com/removed": "yes", "example.com/kept": "yes"}
	})
	adjusted := func(t *testing.T, annotations map[string]string, when string) {
		t.Helper()
		equal(t, "annotations at "+when, fmt.Sprint(annotations), fmt.Sprint(map[string]string{key: value, "example.com/kept": "yes"}))
	}
	if names := first.Names(c.id); !slices.Contains(names, "StartContainer") || !slices.Contains(names, "PostCreateContainer") {
		t.Errorf("events %q", names)
	}
	for _, e := range first.Events(c.id) {
		if e.Name != "CreateContainer" {
			adjusted(t, e.Container.Annotations, e.Name)
		}
	}
	must(t, w.Crash(t.Context()))
	equal(t, "handler in the status after a crash", p.status(t).RuntimeHandler, "")
	second := w.Plugin(t, "20", &nriplugin.Plugin{})
	<-second.Synced()
	_, containers := second.Synchronized()
	equal(t, "containers at Synchronize", len(containers), 1)
	for _, known := range containers {
		adjusted(t, known.Annotations, "Synchronize")
	}
	ip := p.status(t).Network.Ip
	p.stop(t)
	must(t, w.Crash(t.Context()))
	third := w.Plugin(t, "30", &nriplugin.Plugin{})
	p.remove(t)
	wait.For(t, "the plugin to learn of the removal", func() bool { return slices.Contains(third.Names(p.id), "RemovePodSandbox") })
	for _, e := range third.Events(p.id) {
		if e.Name == "RemovePodSandbox" {
			equal(t, "address of the removed pod is told", slices.Contains(e.Pod.Ips, ip), true)
			equal(t, "namespaces of the removed pod", len(e.Pod.GetLinux().GetNamespaces()), 0)
		}
	}
}
