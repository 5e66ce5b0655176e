package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/test/kit/nriplugin"
	"github.com/crius-run/crius/test/kit/tools"
	"github.com/crius-run/crius/test/kit/wait"
)

// attendant is an NRI plugin that adjusts every container, and that reconnects
// when the server has dropped it or has died.
type attendant struct {
	socket string
	end    context.CancelFunc
	ended  chan struct{}

	mu       sync.Mutex
	plugin   *nriplugin.Plugin // nil: not connected
	points   []string          // hooks that have run so far
	hook     func(point string, p *nriplugin.Plugin)
	adjusted map[string]bool // ids of containers
}

func newAttendant(ctx context.Context, socket string) *attendant {
	ctx, end := context.WithCancel(ctx)
	a := &attendant{socket: socket, end: end, ended: make(chan struct{}), adjusted: map[string]bool{}}
	go func() {
		defer close(a.ended)
		poll.Until(ctx, 10*time.Millisecond, func() bool { a.attend(ctx); return false })
	}()
	return a
}

func (a *attendant) close() {
	a.end()
	<-a.ended
}

// attend runs one connection.
func (a *attendant) attend(ctx context.Context) {
	p := &nriplugin.Plugin{Create: a.create}
	p.Answer = func(e nriplugin.Event) error { a.meet(pluginPoint+e.Name, p); return nil }
	if p.Connect(ctx, a.socket, "10", "attendant") != nil {
		return
	}
	select {
	case <-p.Synced():
		a.set(p)
	case <-p.Closed():
	case <-ctx.Done():
	}
	select {
	case <-p.Closed():
	case <-ctx.Done():
		p.Close()
	}
	a.set(nil)
}

func (a *attendant) set(p *nriplugin.Plugin) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.plugin = p
}

// meet records a point, and carries out the action there.
func (a *attendant) meet(point string, p *nriplugin.Plugin) {
	a.mu.Lock()
	a.points = append(a.points, point)
	hook := a.hook
	a.mu.Unlock()
	if hook != nil {
		hook(point, p)
	}
}

func (a *attendant) create(_ *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.adjusted[c.Id] = a.plugin != nil // otherwise it has died in the hook
	return nriplugin.Everything(), nil, nil
}

// watch has hook called in every hook of the plugin; nil ends that.
func (a *attendant) watch(hook func(point string, p *nriplugin.Plugin)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hook = hook
}

// met returns the points so far.
func (a *attendant) met() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.points)
}

// await waits until the plugin is connected.
func (a *attendant) await(ctx context.Context) error {
	if !wait.Until(ctx, func() bool { a.mu.Lock(); defer a.mu.Unlock(); return a.plugin != nil }) {
		return errors.New("the NRI plugin cannot connect")
	}
	return nil
}

func (a *attendant) has(id string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.adjusted[id]
}

// pluginPoint is the prefix of the points at which a hook of the plugin runs.
const pluginPoint = "NRI "

func pluginExperiments(v verb, handler string, points []string) []experiment {
	var all []experiment
	slices.Sort(points)
	for _, point := range slices.Compact(points) {
		for _, action := range []string{killServer, dieBefore} {
			all = append(all, experiment{verb: v, handler: handler, action: action, point: point})
		}
	}
	return all
}

// disturbHook kills the server while a hook of the plugin runs, or makes the
// plugin die in it.
func (w *world) disturbHook(ctx context.Context, e experiment, run func()) (hit bool, err error) {
	done := make(chan error, 1)
	var once sync.Once
	w.plugin.watch(func(point string, p *nriplugin.Plugin) {
		if point != e.point {
			return
		}
		once.Do(func() {
			if e.action == killServer {
				done <- w.Kill()
				return
			}
			w.plugin.set(nil)
			p.Die()
			done <- nil
		})
	})
	defer w.plugin.watch(nil)
	run()
	hit = wait.Until(ctx, func() bool { return len(done) > 0 }) // a stop continues when the container has ended
	if hit {
		err = <-done
	}
	return hit, err
}

// wantAdjusted checks that what the plugin has set is in force, and reported,
// for every container that has not ended. In a sandbox with a kernel of its own
// a container's limit is not that of its cgroup.
func (w *world) wantAdjusted(ctx context.Context) error {
	pods, err := w.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	handlers := map[string]string{}
	for _, p := range pods.Items {
		handlers[p.Id] = p.RuntimeHandler
	}
	list, err := w.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return err
	}
	for _, c := range list.Containers {
		if c.State == cri.ContainerState_CONTAINER_EXITED || !w.plugin.has(c.Id) {
			continue
		}
		status, err := w.Runtime().ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id})
		if err != nil {
			return err
		}
		if got := status.Status.Resources.GetLinux().GetMemoryLimitInBytes(); got != nriplugin.MemoryLimit {
			return fmt.Errorf("status of container %s says a memory limit of %d, the plugin has set %d", c.Id, got, nriplugin.MemoryLimit)
		}
		if sandboxed := []string{tools.Gvisor, tools.GvisorShim, tools.Kata, tools.Kata1, tools.KataCLI}; slices.Contains(sandboxed, handlers[c.PodSandboxId]) {
			continue
		}
		file := filepath.Join("/sys/fs/cgroup/memory", w.CgroupParent(), "crius-"+c.Id, "memory.limit_in_bytes")
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if got := strings.TrimSpace(string(text)); got != fmt.Sprint(nriplugin.MemoryLimit) {
			return fmt.Errorf("%s says %s, the plugin has set %d", file, got, nriplugin.MemoryLimit)
		}
	}
	return nil
}
