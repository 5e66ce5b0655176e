package pod

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
)

// Listen starts collecting events; the caller closes the Listener.
func (e *Engine) Listen() (*view.Listener, error) { return e.events.Listen() }

// StopEvents ends all listeners, so that a stopping server need not wait for them.
func (e *Engine) StopEvents() { e.events.Close(errClosing) }

// emit sends an event of the pod or of one of its containers.
func (s *Sandbox) emit(id string, kind cri.ContainerEventType) {
	s.engine.events.Emit(func() *view.Event {
		return &view.Event{ID: id, Type: kind, At: time.Now(), Sandbox: s.View(), Containers: s.memberViews()}
	})
}
