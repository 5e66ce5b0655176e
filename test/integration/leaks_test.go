package integration

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// sandbox runs and removes a pod without containers.
func (w *world) sandbox(ctx context.Context, name, handler string) error {
	config := kubelet.Pod(name)
	p, err := w.Runtime().RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	if err != nil {
		return err
	}
	if _, err := w.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.PodSandboxId}); err != nil {
		return err
	}
	_, err = w.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.PodSandboxId})
	return err
}

// life takes a pod through its whole life, from nothing to nothing.
func (w *world) life(ctx context.Context, name, handler string, code int) error {
	config := kubelet.Pod(name, kubelet.LogsBelow(w.Path("logs")))
	defer os.RemoveAll(config.LogDirectory)
	r := w.Runtime()
	p, err := r.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	if err != nil {
		return fmt.Errorf("RunPodSandbox of %s: %w", name, err)
	}
	container := kubelet.Container("c", probe, steps(fmt.Sprintf("echo lives ; exit %d", code)))
	c, err := r.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: p.PodSandboxId, SandboxConfig: config, Config: container})
	if err != nil {
		return fmt.Errorf("CreateContainer of %s: %w", name, err)
	}
	if _, err := r.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
		return fmt.Errorf("StartContainer of %s: %w", name, err)
	}
	var s *cri.ContainerStatusResponse
	ended := wait.Until(ctx, func() bool {
		s, err = r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.ContainerId})
		return err != nil || s.Status.State == cri.ContainerState_CONTAINER_EXITED
	})
	if err != nil {
		return fmt.Errorf("ContainerStatus of %s: %w", name, err)
	}
	if !ended || s.Status.ExitCode != int32(code) {
		return fmt.Errorf("%s is %v, code %d (%s %s), want code %d", name, s.Status.State, s.Status.ExitCode, s.Status.Reason, s.Status.Message, code)
	}
	if _, err := r.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.PodSandboxId}); err != nil {
		return fmt.Errorf("StopPodSandbox of %s: %w", name, err)
	}
	if _, err := r.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.PodSandboxId}); err != nil {
		return fmt.Errorf("RemovePodSandbox of %s: %w", name, err)
	}
	return nil
}

// One after the other and several at once, over a bridge that masquerades,
// because its rules could be left, too.
func TestPodsLeakNothing(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	conf := w.Path("cni", "net.d", "10-p.conflist")
	put(t, conf, strings.Replace(read(t, conf), `"isGateway": true`, `"isGateway": true, "ipMasq": true`, 1))
	ctx := t.Context()
	churn := func(pods, withContainer int) {
		for i := range pods {
			if err := w.sandbox(ctx, fmt.Sprintf("seq-%d", i), handlers[i%2]); err != nil {
				t.Fatal(err)
			}
		}
		for i := range withContainer {
			if err := w.life(ctx, fmt.Sprintf("full-%d", i), handlers[i%2], i%100); err != nil {
				t.Fatal(err)
			}
		}
		var group sync.WaitGroup
		for i := range 6 {
			group.Go(func() {
				if err := w.life(ctx, fmt.Sprintf("par-%d", i), handlers[i%2], i); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
	}
	churn(2, 2) // what a busy server keeps anyway: connections, caches
	stacks := w.goroutines(t)
	churn(2, 2) // once more, for the server that had to be restarted for the dump
	before, working := w.load(t), w.metric(t, "go_goroutines")
	churn(20, 10)
	settled := wait.Until(ctx, func() bool { return w.load(t).Total() <= before.Total()+2 })
	wait.Until(ctx, func() bool { return w.metric(t, "go_goroutines") <= working+2 }) // those that end have ended
	if !settled {
		now := w.load(t)
		t.Errorf("file descriptors went from %d to %d\nbefore: %v\n after: %v", before.Total(), now.Total(), before.FDs, now.FDs)
	}
	for kind, n := range w.goroutines(t) {
		if n > stacks[kind]+2 {
			t.Errorf("%d goroutines, before %d, made at %s", n, stacks[kind], kind)
		}
	}
	w.Restored(t, w.empty)
	for _, ip := range mustInventory(t, w).About("lease:") {
		t.Errorf("an address is still taken: %s", ip)
	}
}

func (w *world) load(t *testing.T) inventory.Load {
	t.Helper()
	l, err := inventory.Server(w.PID())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// goroutines counts the server's goroutines by where they were created, and
// restarts the server.
func (w *world) goroutines(t *testing.T) map[string]int {
	t.Helper()
	dump, err := w.Stacks()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for _, g := range strings.Split(dump, "\n\n") {
		if _, by, ok := strings.Cut(g, "created by "); ok && strings.Contains(g, "goroutine ") {
			by, _, _ = strings.Cut(by, " in goroutine")
			out[strings.TrimSpace(by)]++
		}
	}
	if len(out) == 0 {
		t.Fatalf("no goroutines in the dump: %.500s", dump)
	}
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return out
}

// Each of several concurrent pods has its own address.
func TestPodsAtOnceHaveAddressesOfTheirOwn(t *testing.T) {
	t.Parallel()
	w := shared(t)
	var mu sync.Mutex
	seen := map[string]string{}
	var group sync.WaitGroup
	for i := range 6 {
		group.Go(func() {
			config := w.podConfig(t, func(c *cri.PodSandboxConfig) { c.Metadata.Name = fmt.Sprintf("at-once-%d", i) })
			p, err := w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handlers[i%2]})
			if err != nil {
				t.Error(err)
				return
			}
			s, err := w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.PodSandboxId})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ips := append([]string{s.Status.Network.Ip}, additional(s.Status.Network)...)
			for _, ip := range ips {
				if seen[ip] != "" {
					t.Errorf("two pods have %s", ip)
				}
				seen[ip] = p.PodSandboxId
			}
		})
	}
	group.Wait()
	for _, id := range slices.Compact(slices.Sorted(maps.Values(seen))) {
		(&pod{w: w, id: id, config: &cri.PodSandboxConfig{LogDirectory: w.Path("none")}, made: []string{id}}).vanish(t)
	}
}

func additional(n *cri.PodSandboxNetworkStatus) []string {
	var out []string
	for _, ip := range n.AdditionalIps {
		out = append(out, ip.Ip)
	}
	return out
}
