package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/nri/pkg/api"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/nriplugin"
)

// Plugins that hang, die in a hook, or send invalid data are dropped: pods live
// and end unaffected, and nothing of the plugins is left.
func TestHostilePluginsAreDropped(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{Config: "[nri]\nrequest_timeout = \"200ms\"\n"})
	over := make(chan struct{})
	for _, c := range []struct {
		name      string
		misbehave func(p *nriplugin.Plugin, event string)
		dropped   bool
	}{
		{"hangs", func(*nriplugin.Plugin, string) { <-over }, true},
		{"dies", func(p *nriplugin.Plugin, _ string) { p.Die() }, true},
		{"sends garbage", func(p *nriplugin.Plugin, _ string) { _ = p.Send([]byte(strings.Repeat("garbage", 1000))) }, true},
		{"sends 100 MiB", flood, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			end := w.connectRepeatedly(t, func() *nriplugin.Plugin {
				p := &nriplugin.Plugin{}
				p.Answer = func(e nriplugin.Event) error { c.misbehave(p, e.Name); return nil }
				return p
			})
			var lives sync.WaitGroup
			for i, handler := range slices.Repeat(handlers, 2) {
				lives.Go(func() {
					if err := w.life(t.Context(), fmt.Sprintf("hostile-%d", i), handler, i); err != nil {
						t.Error(err)
					}
				})
			}
			lives.Wait()
			if dropped := end(); c.dropped && dropped == 0 {
				t.Error("no plugin was dropped")
			}
		})
	}
	close(over)
	w.Restored(t, w.empty)
}

// flood sends frames of 4 MiB, the maximum of the protocol, on a channel that
// nothing reads, and a request as large, while it is asked about a container.
func flood(p *nriplugin.Plugin, event string) {
	if event != "CreateContainer" {
		return
	}
	const most = 4 << 20
	frame := append([]byte{0, 0, 0, 77, 0, most >> 16, 0, 0}, make([]byte, most)...)
	for range 24 {
		_ = p.Send(frame)
	}
	_, _ = p.Ask(&api.ContainerUpdate{ContainerId: strings.Repeat("x", most-1000)})
}

// connectRepeatedly connects plugins, one after the other, until end is called, which
// returns how many of them were dropped.
func (w *world) connectRepeatedly(t *testing.T, plugin func() *nriplugin.Plugin) (end func() (dropped int)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var dropped int
	var siege sync.WaitGroup
	connected := make(chan struct{})
	siege.Go(func() {
		first := sync.OnceFunc(func() { close(connected) })
		for ctx.Err() == nil {
			p := plugin()
			if p.Connect(ctx, w.Path("nri.sock"), "10", "hostile") != nil {
				continue
			}
			first()
			select {
			case <-p.Closed():
				dropped++
			case <-ctx.Done():
				p.Close()
			}
		}
	})
	<-connected
	return func() int {
		cancel()
		siege.Wait()
		return dropped
	}
}

// Nonsensical answers are refused by the node or by the runtime: the server
// stays unaffected, and nothing of the plugins' changes is left.
func TestNonsenseOfPlugins(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	n := newNonsense(t)
	plugin := w.Plugin(t, "10", &nriplugin.Plugin{
		Create: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
			return n.adjustment(), n.updates(""), nil
		},
		Update: func(c *api.Container, _ *api.LinuxResources) ([]*api.ContainerUpdate, error) {
			return n.updates(c.Id), nil
		},
		Stop: func(*api.Container) []*api.ContainerUpdate { return n.updates("") },
	})
	const containers = 10
	for _, handler := range handlers {
		p := w.run(t, handler)
		for range containers {
			c, err := p.try(t.Context(), steps("sleep"))
			if err != nil {
				continue
			}
			_, _ = w.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.id})
			_, _ = w.Runtime().UpdateContainerResources(t.Context(), &cri.UpdateContainerResourcesRequest{
				ContainerId: c.id, Linux: &cri.LinuxContainerResources{CpuShares: 100},
			})
			_, err = plugin.Ask(n.updates(c.id)...)
			must(t, err)
		}
		p.vanish(t)
	}
	plugin.Close()
	must(t, w.life(t.Context(), "afterwards", "runc", 0))
	w.Restored(t, w.empty)
}

// nonsense makes nonsensical messages of plugins.
type nonsense struct {
	mu     sync.Mutex
	random *rand.Rand
}

func newNonsense(t *testing.T) *nonsense {
	t.Helper()
	return &nonsense{random: rand.New(rand.NewPCG(seed(t), 0))}
}

// adjustment leaves out what would cause an immediate refusal.
func (n *nonsense) adjustment() *api.ContainerAdjustment {
	n.mu.Lock()
	defer n.mu.Unlock()
	a := &api.ContainerAdjustment{}
	nriplugin.Nonsense(n.random, a)
	a.CDIDevices = nil
	if l := a.Linux; l != nil {
		l.CgroupsPath, l.Rdt = "", nil
		if r := l.Resources; r != nil {
			r.BlockioClass, r.RdtClass = nil, nil
		}
	}
	return a
}

// updates are some of missing containers, and one of the container with the id,
// if any.
func (n *nonsense) updates(id string) []*api.ContainerUpdate {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := []*api.ContainerUpdate{{}, {}, {}}
	for _, u := range all {
		nriplugin.Nonsense(n.random, u)
	}
	if id != "" {
		all[0].ContainerId = id
	}
	return all
}
