package pod

import (
	"slices"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/view"
)

// Listen begins to collect events; the caller closes the Listener.
func (e *Engine) Listen() (*view.Listener, error) { return e.events.Listen() }

// StopEvents ends all listening, so that a server that stops need not wait.
func (e *Engine) StopEvents() { e.events.Close(errClosing) }

// tell makes known what has become of the container since it was called last.
func (c *Container) tell() {
	now, skip := c.stage()
	c.progress.Reach(now, skip, func(kind cri.ContainerEventType) { c.sandbox.emit(c.id, kind) })
}

// stage is how far the container has come. One whose program has ended before
// it was known to run is told of when both are known; one that could never be
// started has skipped a stage.
func (c *Container) stage() (now, skip view.Stage) {
	at := c.now()
	switch {
	case at.gone:
		now = view.Deleted
	case at.exit != nil && (at.Phase != records.Starting || at.StartError != ""):
		now = view.Stopped
	case at.Phase == records.Started:
		now = view.Started
	default:
		now = view.Created
	}
	if at.StartedAt.IsZero() {
		skip = view.Started
	}
	return now, skip
}

// tell makes known what has become of the pod.
func (s *Sandbox) tell() {
	now, at := view.Started, s.now() // a pod is, or is not
	switch {
	case at.gone:
		now = view.Deleted
	case s.ending.Err() != nil || at.Phase != records.Ready:
		now = view.Stopped
	}
	s.progress.Reach(now, view.Unknown, func(kind cri.ContainerEventType) { s.emit(s.id, kind) })
}

// emit makes an event of the pod or one of its containers.
func (s *Sandbox) emit(id string, kind cri.ContainerEventType) {
	s.engine.events.Emit(func() *view.Event {
		return &view.Event{ID: id, Type: kind, At: time.Now(), Sandbox: s.view.Load(), Containers: s.memberViews()}
	})
}

// memberViews are the pod's containers, newest first.
func (s *Sandbox) memberViews() []*view.Container {
	views := mapped(s.now().containers, func(c *Container) *view.Container { return c.view.Load() })
	slices.SortFunc(views, func(a, b *view.Container) int { return b.CreatedAt.Compare(a.CreatedAt) })
	return views
}

// SandboxContainers are the containers of a pod, newest first.
func (e *Engine) SandboxContainers(id string) ([]*view.Container, error) {
	s, err := e.sandboxes.Find(id)
	if err != nil {
		return nil, err
	}
	return s.memberViews(), nil
}
