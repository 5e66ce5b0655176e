package integration

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// podsOfAllKinds fills a node with pods of many kinds, and containers in every state.
func (w *world) podsOfAllKinds(t *testing.T) []*pod {
	t.Helper()
	file := filepath.Join(w.dir(t), "file")
	put(t, file, "mounted")
	forPod, forContainer := pidMode(cri.NamespaceMode_POD)
	var pods []*pod
	for i, handler := range handlers {
		plain := w.run(t, handler)
		plain.start(t, "sleep")
		plain.create(t, "sleep")
		plain.start(t, "exit 3").wait(t)
		plain.start(t, "alloc 200", func(c *cri.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = 32 * mib }).wait(t)

		odd := w.run(t, handler, func(c *cri.PodSandboxConfig) {
			c.Labels = map[string]string{"empty": "", "ключ": "значение", "long": strings.Repeat("l", 10_000)}
			c.Annotations = map[string]string{"lines": "a\nb", "nul": "\x00"}
			c.Hostname = "odd.example"
			c.DnsConfig = &cri.DNSConfig{Servers: []string{"10.0.0.10"}, Searches: []string{"a.b"}, Options: []string{"ndots:5"}}
			c.PortMappings = []*cri.PortMapping{{HostPort: int32(31000 + i), ContainerPort: 80}}
			c.Linux.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1"}
			c.Metadata.Attempt = 7
		})
		odd.start(t, "sleep", func(c *cri.ContainerConfig) {
			c.Tty, c.Stdin, c.StdinOnce = true, true, true
			c.Metadata.Attempt = 9
			c.StopSignal = cri.Signal_SIGNAL_SIGUSR1
			c.Mounts = []*cri.Mount{{ContainerPath: "/m", HostPath: file, Readonly: true, Propagation: cri.MountPropagation_PROPAGATION_PRIVATE}}
			c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: 1001}
			c.Linux.SecurityContext.SupplementalGroups = []int64{5, 6}
		})
		updated := odd.start(t, "sleep", func(c *cri.ContainerConfig) { c.LogPath = "" })
		if _, err := w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
			ContainerId: updated.id, Linux: &cri.LinuxContainerResources{MemoryLimitInBytes: 77 * mib, CpuShares: 99},
		}); err != nil {
			t.Fatal(err)
		}

		host := w.run(t, handler, kubelet.HostNetwork)
		host.start(t, "sleep", hostNetworkContainer)
		together := w.run(t, handler, forPod)
		together.start(t, "sleep", forContainer)
		stopped := w.run(t, handler)
		stopped.start(t, "trap TERM ; exit 6")
		stopped.stop(t)
		empty := w.run(t, handler)
		pods = append(pods, plain, odd, host, together, stopped, empty)
	}
	return pods
}

// randomPods are random pods; FULL=1 makes 200.
func (w *world) randomPods(t *testing.T) (pods []*pod) {
	t.Helper()
	n := 3
	if os.Getenv("FULL") != "" {
		n = 200
	}
	r := rand.New(rand.NewPCG(seed(t), 0))
	for range n {
		p := w.run(t, handlers[r.IntN(len(handlers))], func(c *cri.PodSandboxConfig) { shapePod(r, c) })
		for range r.IntN(3) {
			line := []string{"sleep", "exit 3", "alloc 64", "suicide TERM", "echo said"}[r.IntN(5)]
			c := p.create(t, line, func(c *cri.ContainerConfig) { shapeContainer(r, p.config, c) })
			if r.IntN(4) == 0 {
				continue // never started
			}
			c.start(t)
			if line != "sleep" {
				c.wait(t)
			}
		}
		if r.IntN(4) == 0 {
			p.stop(t)
		}
		pods = append(pods, p)
	}
	return pods
}

// seed returns the seed of random input: the same in each run of all tests, so
// that none of them has an input that others did not, and a new one with
// FULL=1.
func seed(t *testing.T) uint64 {
	t.Helper()
	if os.Getenv("FULL") == "" {
		return 1
	}
	seed := rand.Uint64()
	t.Logf("seed of the random input: %d", seed)
	return seed
}

// maybe returns true half of the time.
func maybe(r *rand.Rand) bool { return r.IntN(2) == 0 }

// text returns a random valid label value.
func text(r *rand.Rand) string {
	runes := make([]rune, r.IntN(12))
	for i := range runes {
		runes[i] = []rune("abcZ09._-/ \t\"'{}ключ日本\u0000\U0001F680")[r.IntN(24)]
	}
	return string(runes)
}

func shapePod(r *rand.Rand, c *cri.PodSandboxConfig) {
	for range r.IntN(4) {
		c.Labels["k"+text(r)], c.Annotations["k"+text(r)] = text(r), text(r)
	}
	c.Metadata.Attempt = uint32(r.IntN(5))
	options := c.Linux.SecurityContext.NamespaceOptions
	switch r.IntN(4) {
	case 0:
		kubelet.HostNetwork(c)
	case 1:
		options.Pid = cri.NamespaceMode_POD
	case 2:
		options.Ipc = cri.NamespaceMode_NODE
	default:
		c.Hostname = fmt.Sprintf("h%d.example", r.IntN(100))
		c.Linux.Sysctls = map[string]string{"net.ipv4.ip_local_port_range": "2000 3000"}
	}
	if maybe(r) {
		c.DnsConfig = &cri.DNSConfig{Servers: []string{"10.0.0.1", "fd00::1"}[:r.IntN(3)], Searches: []string{"a.b", "c"}[:r.IntN(3)]}
	}
	if maybe(r) {
		c.Linux.Resources = &cri.LinuxContainerResources{CpuShares: int64(2 + r.IntN(1000)), MemoryLimitInBytes: int64(r.IntN(100)+50) * mib}
	}
}

func shapeContainer(r *rand.Rand, pod *cri.PodSandboxConfig, c *cri.ContainerConfig) {
	for range r.IntN(4) {
		c.Labels = map[string]string{"k" + text(r): text(r)}
		c.Annotations = map[string]string{"k" + text(r): text(r)}
		c.Envs = append(c.Envs, &cri.KeyValue{Key: fmt.Sprint("E", r.IntN(9)), Value: fmt.Append(nil, r.IntN(9))})
	}
	options := pod.Linux.SecurityContext.NamespaceOptions
	c.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{Network: options.GetNetwork(), Pid: options.GetPid(), Ipc: options.GetIpc()}
	c.Metadata.Attempt = uint32(r.IntN(3))
	c.Tty, c.Stdin = maybe(r), maybe(r)
	if maybe(r) {
		c.LogPath = ""
	}
	if maybe(r) {
		c.Linux.SecurityContext.RunAsUser = &cri.Int64Value{Value: int64(r.IntN(1 << 16))}
		c.Linux.SecurityContext.RunAsGroup = &cri.Int64Value{Value: int64(r.IntN(1 << 16))}
	}
	if maybe(r) {
		c.StopSignal = cri.Signal(r.IntN(len(cri.Signal_name)))
	}
	if maybe(r) {
		c.Linux.Resources.MemoryLimitInBytes = 32 * mib
		c.Linux.Resources.MemorySwapLimitInBytes = 32 * mib
	}
	c.Linux.SecurityContext.ReadonlyRootfs = maybe(r)
}

// everything returns all that CRI reports about pods, containers and images, by
// id.
func (w *world) everything(t *testing.T) map[string]proto.Message {
	t.Helper()
	ctx, r, out := t.Context(), w.Runtime(), map[string]proto.Message{}
	pods, err := r.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pods.Items {
		out["listed pod "+p.Id] = p
		s, err := r.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: p.Id, Verbose: true})
		if err != nil {
			t.Fatal(err)
		}
		s.Timestamp, s.ContainersStatuses = 0, nil // of the reply, not of the pod
		out["pod "+p.Id] = s
	}
	containers, err := r.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range containers.Containers {
		out["listed container "+c.Id] = c
		s, err := r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id, Verbose: true})
		if err != nil {
			t.Fatal(err)
		}
		out["container "+c.Id] = s
	}
	for _, i := range w.listImages(t, nil) {
		out["image "+i.Id] = i
	}
	return out
}

func equalEverything(t *testing.T, before, after map[string]proto.Message) {
	t.Helper()
	for _, key := range slices.Sorted(maps.Keys(before)) {
		if after[key] == nil {
			t.Errorf("%s is gone", key)
		} else if !proto.Equal(before[key], after[key]) {
			t.Errorf("%s differs:\nbefore: %v\n after: %v", key, before[key], after[key])
		}
	}
	for _, key := range slices.Sorted(maps.Keys(after)) {
		if before[key] == nil {
			t.Errorf("%s is new", key)
		}
	}
}

func TestNothingChangesByARestart_crio_10014(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	pods := append(w.podsOfAllKinds(t), w.randomPods(t)...)
	before, things := w.everything(t), mustInventory(t, w)
	for name, restart := range map[string]func(context.Context) error{"SIGTERM": w.Restart, "SIGKILL": w.Crash} {
		t.Run(name, func(t *testing.T) {
			if err := restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			equalEverything(t, before, w.everything(t))
			w.Restored(t, things)
		})
	}
	// What runs can be managed as before.
	running := &container{pod: pods[0], id: pods[0].made[1], config: kubelet.Container("c1", probe, nil)}
	running.exec(t, "echo alive")
	running.stop(t, scene.LimitSeconds)
	equal(t, "exit code after SIGTERM", running.status(t).ExitCode, 143)
	created := &container{pod: pods[0], id: pods[0].made[2], config: kubelet.Container("c2", probe, nil)}
	created.start(t)
	equal(t, "state", created.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	for _, p := range pods {
		p.vanish(t)
	}
	w.Restored(t, w.empty)
}

func TestExitsAndOutputDuringDowntime(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	p := w.run(t, "crun")
	dir := w.dir(t)
	shared := withMounts(&cri.Mount{ContainerPath: "/shared", HostPath: dir})
	began := time.Now()
	var all []*container
	for i := range 3 {
		all = append(all, p.start(t, fmt.Sprintf("await /shared/go ; echo last-words ; exit %d", 40+i), shared))
	}
	oom := p.start(t, "await /shared/go ; alloc 200", shared, func(c *cri.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = 32 * mib })
	writer := p.start(t, "lines 1000000000 1ms")
	must(t, w.Kill())
	put(t, filepath.Join(dir, "go"), "")
	wait.For(t, "the monitors to note how the containers have ended", func() bool {
		return !slices.ContainsFunc(append(all, oom), func(c *container) bool {
			_, err := os.Stat(filepath.Join(w.StateRoot(), "containers", c.id, "exit.json"))
			return err != nil
		})
	})
	ended := time.Now() // a time taken at the restart would be later
	must(t, w.Start(t.Context()))
	for i, c := range append(all, oom) {
		s := c.status(t)
		equal(t, "state", s.State, cri.ContainerState_CONTAINER_EXITED)
		if finished := time.Unix(0, s.FinishedAt); finished.Before(began) || finished.After(ended) {
			t.Errorf("finished at %v, but the container ended between %v and %v", finished, began, ended)
		}
		if c == oom {
			equal(t, "reason", s.Reason, "OOMKilled")
			continue
		}
		equal(t, "exit code", s.ExitCode, int32(40+i))
		equal(t, "output", c.output(t), "last-words\n")
	}
	must(t, w.Crash(t.Context()))
	writer.stop(t, 0) // so that no record is half-written
	for i, line := range strings.Split(strings.TrimSuffix(writer.output(t), "\n"), "\n") {
		if line != fmt.Sprint("line ", i+1) {
			t.Fatalf("line %d of the log is %q", i+1, line)
		}
	}
}

// A server that is killed in the middle of a stop knows afterwards how the container has ended, or stops it when it
// is asked again, and the container can be removed.
func TestServerIsKilledInTheMiddleOfAStop_containerd_12600_containerd_7680(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	each(t, func(t *testing.T, handler string) {
		p := w.run(t, handler)
		dir := w.dir(t)
		shared := withMounts(&cri.Mount{ContainerPath: "/shared", HostPath: dir})
		ends := p.start(t, "trap TERM ; await /shared/go ; exit 9", shared)
		stays := p.start(t, "ignore TERM ; echo ready ; sleep")
		var stops []chan error
		for _, c := range []*container{ends, stays} {
			c.says(t, "ready")
			stopped := make(chan error, 1)
			stops = append(stops, stopped)
			go func() {
				_, err := w.Runtime().StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.id, Timeout: scene.LimitSeconds})
				stopped <- err
			}()
			c.says(t, "SIGTERM")
		}
		must(t, w.Kill())
		for _, stopped := range stops {
			wantCode(t, scene.Receive(t, "the stop to return", stopped), codes.Unavailable)
		}
		put(t, filepath.Join(dir, "go"), "")
		wait.For(t, "the monitor to note how the container has ended", func() bool {
			_, err := os.Stat(filepath.Join(w.StateRoot(), "containers", ends.id, "exit.json"))
			return err == nil
		})
		must(t, w.Start(t.Context()))
		equal(t, "state of the one that ended meanwhile", ends.status(t).State, cri.ContainerState_CONTAINER_EXITED)
		equal(t, "its exit code", ends.status(t).ExitCode, 9)
		ends.remove(t)
		equal(t, "state of the other one", stays.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
		stays.stop(t, 0)
		equal(t, "its exit code", stays.status(t).ExitCode, 137)
		stays.remove(t)
	})
}

func TestSIGTERMWaitsForWorkUnderWay(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	plugin := w.cni(t)
	running := w.run(t, "runc")
	c := running.start(t, "sleep")
	plugin.does(t, "ADD", "once slow 2s")
	config := w.podConfig(t)
	type answer struct {
		id  string
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		resp, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
		answered <- answer{resp.GetPodSandboxId(), err}
	}()
	wait.For(t, "the plugin to be called", func() bool { _, err := os.Stat(filepath.Join(plugin.dir, "faults", "ADD")); return os.IsNotExist(err) })
	if err := w.Stop(); err != nil {
		t.Errorf("the server ended with %v", err)
	}
	a := <-answered
	if a.err != nil {
		t.Errorf("the pod that was being made: %v", a.err)
	}
	if len(w.processesOf(t, c.id)) == 0 {
		t.Error("a container has ended with the server")
	}
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	equal(t, "state of the container", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	if a.err == nil {
		p := &pod{w: w, id: a.id, config: config, made: []string{a.id}}
		equal(t, "state of the new pod", p.status(t).State, cri.PodSandboxState_SANDBOX_READY)
		p.vanish(t)
	}
}
