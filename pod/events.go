package pod

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/view"
)

// Listen begins to collect events; the caller closes the Listener.
func (e *Engine) Listen() (*view.Listener, error) { return e.events.Listen() }

// StopEvents ends all listening, so that a server that stops need not wait.
func (e *Engine) StopEvents() { e.events.Close(errClosing) }

// stage is how far the container has come. One whose program has ended before
// it was known to run is told of when both are known; one that could never be
// started has skipped a stage.
func (c *Container) stage() (now, skip view.Stage) {
	at := c.Now()
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

// stage is how far the pod has come: it is, or is not, and has no other stages.
func (s *Sandbox) stage() (now, skip view.Stage) {
	switch at := s.Now(); {
	case at.gone:
		return view.Deleted, view.Unknown
	case s.ending.Err() != nil || at.Phase != records.Ready:
		return view.Stopped, view.Unknown
	}
	return view.Started, view.Unknown
}

// emit makes an event of the pod or one of its containers.
func (s *Sandbox) emit(id string, kind cri.ContainerEventType) {
	s.engine.events.Emit(func() *view.Event {
		return &view.Event{ID: id, Type: kind, At: time.Now(), Sandbox: s.View(), Containers: s.memberViews()}
	})
}
