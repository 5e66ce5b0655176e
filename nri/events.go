package nri

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"

	"github.com/containerd/nri/pkg/api"

	"github.com/crius-run/crius/internal/trace"
)

// RunPod asks plugins whether a pod may run. The caller must call release, also after
// an error, as soon as Node.Pods returns the pod or the pod is gone.
func (p *Plugins) RunPod(ctx context.Context, pod func() *Pod) (release func(), err error) {
	defer trace.For(ctx, "NRI plugins")()
	return p.ask(func() error {
		m := pod().message()
		return p.answered(m, "", func() error { return refused(p.library.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: m})) })
	})
}

// UpdatePod asks plugins whether a pod may get these resources.
func (p *Plugins) UpdatePod(ctx context.Context, pod func() *Pod, overhead, resources *Resources) error {
	defer trace.For(ctx, "NRI plugins")()
	release, connected := p.hold()
	defer release()
	if !connected {
		return nil
	}
	_, err := p.library.UpdatePodSandbox(ctx, &api.UpdatePodSandboxRequest{
		Pod:                    pod().message(),
		OverheadLinuxResources: api.FromOCILinuxResources(overhead, nil),
		LinuxResources:         api.FromOCILinuxResources(resources, nil),
	})
	return refused(err)
}

// PodUpdated notifies plugins that a pod got its new resources.
func (p *Plugins) PodUpdated(ctx context.Context, pod func() *Pod) {
	p.notifyOfPod(ctx, "post-update pod", pod, func(ctx context.Context, m *api.PodSandbox) error {
		return p.library.PostUpdatePodSandbox(ctx, &api.PostUpdatePodSandboxRequest{Pod: m})
	})
}

// StopPod notifies plugins that a pod's containers have exited. The pod still has its
// network.
func (p *Plugins) StopPod(ctx context.Context, pod func() *Pod) {
	p.notifyOfPod(ctx, "stop pod", pod, func(ctx context.Context, m *api.PodSandbox) error {
		return p.library.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: m})
	})
}

// RemovePod notifies plugins that a pod is being removed.
func (p *Plugins) RemovePod(ctx context.Context, pod func() *Pod) {
	p.notifyOfPod(ctx, "remove pod", pod, func(ctx context.Context, m *api.PodSandbox) error {
		return p.library.RemovePodSandbox(ctx, &api.RemovePodSandboxRequest{Pod: m})
	})
}

// notifyOfPod notifies plugins of an event. An event is sent only once, and
// therefore to all plugins within their time limits, even if the caller stops
// waiting.
func (p *Plugins) notifyOfPod(ctx context.Context, what string, pod func() *Pod, send func(context.Context, *api.PodSandbox) error) {
	defer trace.For(ctx, "NRI plugins")()
	ctx = context.WithoutCancel(ctx)
	release, connected := p.hold()
	defer release()
	if !connected {
		return
	}
	m := pod().message()
	if err := send(ctx, m); err != nil {
		slog.WarnContext(ctx, "NRI plugin failed", "event", what, "pod", m.GetId(), "err", err)
	}
}

// CreateContainer lets plugins adjust the spec and the annotations of a container in
// place, and returns the limits that they set. The caller must call release, also after an error, as soon
// as Node.Containers returns the container or the container is gone.
func (p *Plugins) CreateContainer(ctx context.Context, container func() *Container) (set *Resources, release func(), err error) {
	defer trace.For(ctx, "NRI plugins")()
	release, err = p.ask(func() (err error) {
		set, err = p.createContainer(ctx, container())
		return err
	})
	return set, release, err
}

func (p *Plugins) createContainer(ctx context.Context, c *Container) (set *Resources, err error) {
	request := &api.CreateContainerRequest{Pod: c.Pod.message(), Container: c.message()}
	var answer *api.CreateContainerResponse
	err = p.answered(request.Pod, request.Container.GetName(), func() (err error) {
		answer, err = p.library.CreateContainer(ctx, request)
		return refused(err)
	})
	if err != nil {
		return nil, err
	}
	p.update(ctx, answer.GetUpdate())
	dropRemovedEnv(c.Spec, request.GetContainer().GetEnv())
	if err := p.adjust(c.Spec, answer.GetAdjust()); err != nil {
		return nil, fmt.Errorf("adjustment by NRI plugins: %w", err)
	}
	if changes := answer.GetAdjust().GetAnnotations(); len(changes) > 0 {
		c.Annotations = map[string]string{}
		maps.Copy(c.Annotations, c.Config.GetAnnotations())
		adjustMap(&c.Annotations, changes)
	}
	return overlaid(&Resources{}, answer.GetAdjust().GetLinux().GetResources()), nil
}

// ContainerCreated notifies plugins that the runtime has created a container.
func (p *Plugins) ContainerCreated(ctx context.Context, container func() *Container) {
	p.notifyOfContainer(ctx, "post-create container", container, func(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
		return p.library.PostCreateContainer(ctx, &api.PostCreateContainerRequest{Pod: pod, Container: c})
	})
}

// StartContainer asks plugins whether a container may be started.
func (p *Plugins) StartContainer(ctx context.Context, container func() *Container) error {
	defer trace.For(ctx, "NRI plugins")()
	release, connected := p.hold()
	defer release()
	if !connected {
		return nil
	}
	c := container()
	return refused(p.library.StartContainer(ctx, &api.StartContainerRequest{Pod: c.Pod.message(), Container: c.message()}))
}

// ContainerStarted notifies plugins that a container runs.
func (p *Plugins) ContainerStarted(ctx context.Context, container func() *Container) {
	p.notifyOfContainer(ctx, "post-start container", container, func(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
		return p.library.PostStartContainer(ctx, &api.PostStartContainerRequest{Pod: pod, Container: c})
	})
}

// UpdateContainer lets plugins change the new limits of a container in place, and
// returns the limits that they set.
func (p *Plugins) UpdateContainer(ctx context.Context, container func() *Container, r *Resources) (set *Resources, err error) {
	defer trace.For(ctx, "NRI plugins")()
	release, connected := p.hold()
	defer release()
	if !connected {
		return nil, nil
	}
	c := container()
	answer, err := p.library.UpdateContainer(ctx, &api.UpdateContainerRequest{
		Pod: c.Pod.message(), Container: c.message(), LinuxResources: api.FromOCILinuxResources(r, nil),
	})
	if err != nil {
		return nil, refused(err)
	}
	var others []*api.ContainerUpdate
	for _, u := range answer.GetUpdate() {
		switch u.GetContainerId() {
		case "": // no plugin has changed anything
		case c.ID:
			if set, err = updated(r, u.GetLinux().GetResources()); err != nil {
				return nil, fmt.Errorf("update by NRI plugins: %w", err)
			}
		default:
			others = append(others, u)
		}
	}
	p.update(ctx, others)
	return set, nil
}

// ContainerUpdated notifies plugins that a container got its new limits.
func (p *Plugins) ContainerUpdated(ctx context.Context, container func() *Container) {
	p.notifyOfContainer(ctx, "post-update container", container, func(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
		return p.library.PostUpdateContainer(ctx, &api.PostUpdateContainerRequest{Pod: pod, Container: c})
	})
}

// StopContainer notifies plugins that a container has exited.
func (p *Plugins) StopContainer(ctx context.Context, container func() *Container) {
	p.notifyOfContainer(ctx, "stop container", container, func(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
		answer, err := p.library.StopContainer(ctx, &api.StopContainerRequest{Pod: pod, Container: c})
		if err == nil {
			p.update(ctx, answer.GetUpdate())
		}
		return err
	})
}

// RemoveContainer notifies plugins that a container is being removed.
func (p *Plugins) RemoveContainer(ctx context.Context, container func() *Container) {
	p.notifyOfContainer(ctx, "remove container", container, func(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
		return p.library.RemoveContainer(ctx, &api.RemoveContainerRequest{Pod: pod, Container: c})
	})
}

// notifyOfContainer is notifyOfPod for a container.
func (p *Plugins) notifyOfContainer(ctx context.Context, what string, container func() *Container, send func(context.Context, *api.PodSandbox, *api.Container) error) {
	defer trace.For(ctx, "NRI plugins")()
	ctx = context.WithoutCancel(ctx)
	release, connected := p.hold()
	defer release()
	if !connected {
		return
	}
	c := container()
	if err := send(ctx, c.Pod.message(), c.message()); err != nil {
		slog.WarnContext(ctx, "NRI plugin failed", "event", what, "container", c.ID, "pod", c.Pod.ID, "err", err)
	}
}

// PodEvents sends the events of one pod. The verbs of the pod call it
// one at a time.
type PodEvents struct {
	Plugins  *Plugins
	Describe func() *Pod

	release func() // of the hold on new plugins; nil: plugins were not asked
	stopped bool   // the stop has been sent
}

// Run calls Plugins.RunPod. The caller calls Shown once readers can see the
// pod, or Undone.
func (e *PodEvents) Run(ctx context.Context) (err error) {
	e.release, err = e.Plugins.RunPod(ctx, e.Describe)
	return err
}

// Shown ends Run.
func (e *PodEvents) Shown() { e.release() }

// Undone undoes Run, if that was called.
func (e *PodEvents) Undone(ctx context.Context) {
	if e.release == nil {
		return
	}
	e.release()
	e.Plugins.StopPod(ctx, e.Describe)
	e.Plugins.RemovePod(ctx, e.Describe)
}

// Stopped is called when all containers have exited, before the network is removed; it
// may be called again.
func (e *PodEvents) Stopped(ctx context.Context) {
	if !e.stopped {
		e.stopped = true
		e.Plugins.StopPod(ctx, e.Describe)
	}
}

// ContainerEvents sends the events of one container, which may exit at any time. The
// verbs of the container call it one at a time.
type ContainerEvents struct {
	Plugins  *Plugins
	Describe func() *Container

	creation *creation // nil: plugins were not asked

	mu      sync.Mutex // keeps the events in order; held while one is sent
	pending bool       // a verb has sent the first of two events
	exited  bool       // the stop must be sent, after the second one
	stopped bool       // the stop has been sent
}

// Create calls Plugins.CreateContainer, as the first of two events. The caller
// calls Confirm when the runtime has created the container, and Created when
// readers can see it, or Undone.
func (e *ContainerEvents) Create(ctx context.Context, container func() *Container) (set *Resources, err error) {
	e.Begin()
	set, release, err := e.Plugins.CreateContainer(ctx, container)
	e.creation = e.Plugins.creation(release)
	return set, err
}

// Confirm is fault.Unavailable if the creation took longer than
// Plugins.CreationTime and a plugin that does not know the container connected
// meanwhile. The container must not run then.
func (e *ContainerEvents) Confirm() error { return e.creation.confirm() }

// Created ends Create.
func (e *ContainerEvents) Created(ctx context.Context) {
	e.creation.end()
	e.End(ctx, e.Plugins.ContainerCreated)
}

// Undone undoes Create, if that was called.
func (e *ContainerEvents) Undone(ctx context.Context) {
	if e.creation == nil {
		return
	}
	e.creation.end()
	e.End(ctx, nil)
	e.Stopped(ctx)
	e.Plugins.RemoveContainer(ctx, e.Describe)
}

// Begin delays the stop until End: a container may exit while a verb works between two
// events.
func (e *ContainerEvents) Begin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pending = true
}

// End sends the verb's second event, which is nil if the verb has failed, and the stop if
// the container has exited meanwhile.
func (e *ContainerEvents) End(ctx context.Context, second func(context.Context, func() *Container)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pending = false
	if second != nil {
		second(ctx, e.Describe)
	}
	e.sendStop(ctx)
}

// Stopped is called when the container has exited; it may be called again.
func (e *ContainerEvents) Stopped(ctx context.Context) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.exited = true
	e.sendStop(ctx)
}

// sendStop requires the lock.
func (e *ContainerEvents) sendStop(ctx context.Context) {
	if e.exited && !e.pending && !e.stopped {
		e.stopped = true
		e.Plugins.StopContainer(ctx, e.Describe)
	}
}
