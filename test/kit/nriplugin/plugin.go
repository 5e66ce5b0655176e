// Package nriplugin is an NRI plugin for tests, built on the library's own
// stub: it records events, and answers as the test says.
package nriplugin

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
)

// Event is an event that a plugin has received. Container is nil in events of
// pods.
type Event struct {
	Name      string // as in the protocol: RunPodSandbox, …
	Pod       *api.PodSandbox
	Container *api.Container
}

// Plugin records all events. Its functions, if not nil, answer them; they must
// not be changed once the plugin is connected.
type Plugin struct {
	// Answer is called for every event; an error refuses what can be refused.
	Answer func(Event) error
	Create func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error)
	Update func(*api.Container, *api.LinuxResources) ([]*api.ContainerUpdate, error)
	// Stop is called when a container has ended.
	Stop func(*api.Container) []*api.ContainerUpdate
	// Sync is called with the existing pods and containers.
	Sync func([]*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error)

	stub stub.Stub
	conn net.Conn // below the protocol; nil: for a plugin that a runtime has started

	mu         sync.Mutex
	pods       []*api.PodSandbox
	containers []*api.Container
	events     []Event
	synced     chan struct{} // closed when Synchronize is called
	closed     chan struct{}
}

// Connect registers the plugin at the runtime that listens on socket. It
// returns once the plugin is registered; the synchronization comes later. A
// plugin that a runtime has started needs none of the three arguments.
func (p *Plugin) Connect(ctx context.Context, socket, index, name string) (err error) {
	p.synced, p.closed = make(chan struct{}), make(chan struct{})
	options := []stub.Option{stub.WithOnClose(sync.OnceFunc(func() { close(p.closed) })), stub.WithLogger(silent{})}
	if socket != "" {
		if p.conn, err = new(net.Dialer).DialContext(ctx, "unix", socket); err != nil {
			return err
		}
		options = append(options, stub.WithPluginName(name), stub.WithPluginIdx(index), stub.WithConnection(p.conn))
	}
	if p.stub, err = stub.New(plugin{p}, options...); err != nil {
		return err
	}
	return p.stub.Start(ctx)
}

// Close disconnects the plugin.
func (p *Plugin) Close() { p.stub.Stop() }

// Closed is closed when the plugin is no longer connected.
func (p *Plugin) Closed() <-chan struct{} { return p.closed }

// Synced is closed when the plugin is being synchronized. Later changes come as
// events.
func (p *Plugin) Synced() <-chan struct{} { return p.synced }

// Ask requests updates from the runtime, and returns those that failed.
func (p *Plugin) Ask(updates ...*api.ContainerUpdate) ([]*api.ContainerUpdate, error) {
	return p.stub.UpdateContainers(updates)
}

// Events returns the events of a pod or a container, by its id; all if it is
// empty.
func (p *Plugin) Events(id string) []Event {
	p.mu.Lock()
	defer p.mu.Unlock()
	if id == "" {
		return slices.Clone(p.events)
	}
	var events []Event
	for _, e := range p.events {
		if e.Container.GetId() == id || e.Container == nil && e.Pod.GetId() == id {
			events = append(events, e)
		}
	}
	return events
}

// Names returns the names of Events.
func (p *Plugin) Names(id string) []string {
	var names []string
	for _, e := range p.Events(id) {
		names = append(names, e.Name)
	}
	return names
}

// Synchronized returns the pods and containers that existed when the plugin
// connected.
func (p *Plugin) Synchronized() ([]*api.PodSandbox, []*api.Container) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.pods), slices.Clone(p.containers)
}

// Knows reports whether the plugin has received a pod or container.
func (p *Plugin) Knows(id string) bool {
	pods, containers := p.Synchronized()
	return len(p.Events(id)) > 0 ||
		slices.ContainsFunc(pods, func(pod *api.PodSandbox) bool { return pod.GetId() == id }) ||
		slices.ContainsFunc(containers, func(c *api.Container) bool { return c.GetId() == id })
}

// Introduced counts how often the plugin has received a pod or container as
// existing, in the synchronization or by the event of its creation: once is
// right.
func (p *Plugin) Introduced(id string) int {
	pods, containers := p.Synchronized()
	n := 0
	for _, pod := range pods {
		if pod.GetId() == id {
			n++
		}
	}
	for _, c := range containers {
		if c.GetId() == id {
			n++
		}
	}
	for _, name := range p.Names(id) {
		if name == "RunPodSandbox" || name == "CreateContainer" {
			n++
		}
	}
	return n
}

func (p *Plugin) note(name string, pod *api.PodSandbox, c *api.Container) error {
	e := Event{name, pod, c}
	p.mu.Lock()
	p.events = append(p.events, e)
	p.mu.Unlock()
	if p.Answer != nil {
		return p.Answer(e)
	}
	return nil
}

// plugin has the methods that the stub looks for.
type plugin struct{ *Plugin }

func (p plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	p.mu.Lock()
	p.pods, p.containers = append(p.pods, pods...), append(p.containers, containers...)
	p.mu.Unlock()
	close(p.synced)
	if p.Sync != nil {
		return p.Sync(pods, containers)
	}
	return nil, nil
}

func (p plugin) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return p.note("RunPodSandbox", pod, nil)
}

func (p plugin) UpdatePodSandbox(_ context.Context, pod *api.PodSandbox, _, _ *api.LinuxResources) error {
	return p.note("UpdatePodSandbox", pod, nil)
}

func (p plugin) PostUpdatePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return p.note("PostUpdatePodSandbox", pod, nil)
}

func (p plugin) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return p.note("StopPodSandbox", pod, nil)
}

func (p plugin) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return p.note("RemovePodSandbox", pod, nil)
}

func (p plugin) CreateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	if err := p.note("CreateContainer", pod, c); err != nil {
		return nil, nil, err
	}
	if p.Create != nil {
		return p.Create(pod, c)
	}
	return nil, nil, nil
}

func (p plugin) PostCreateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.note("PostCreateContainer", pod, c)
}

func (p plugin) StartContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.note("StartContainer", pod, c)
}

func (p plugin) PostStartContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.note("PostStartContainer", pod, c)
}

func (p plugin) UpdateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container, r *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	if err := p.note("UpdateContainer", pod, c); err != nil {
		return nil, err
	}
	if p.Update != nil {
		return p.Update(c, r)
	}
	return nil, nil
}

func (p plugin) PostUpdateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.note("PostUpdateContainer", pod, c)
}

func (p plugin) StopContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	if err := p.note("StopContainer", pod, c); err != nil || p.Stop == nil {
		return nil, err
	}
	return p.Stop(c), nil
}

func (p plugin) RemoveContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.note("RemoveContainer", pod, c)
}

// Refuse returns an Answer that refuses an event times times; 0: always.
func Refuse(name string, times int) func(Event) error {
	var mu sync.Mutex
	done := 0
	return func(e Event) error {
		mu.Lock()
		defer mu.Unlock()
		if e.Name != name || times > 0 && done >= times {
			return nil
		}
		done++
		return fmt.Errorf("%s is refused by this test", name)
	}
}

type silent struct{}

var _ log.Logger = silent{}

func (silent) Debugf(context.Context, string, ...any) {}
func (silent) Infof(context.Context, string, ...any)  {}
func (silent) Warnf(context.Context, string, ...any)  {}
func (silent) Errorf(context.Context, string, ...any) {}
