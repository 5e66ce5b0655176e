package pod

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/pod/view"
)

// Listen begins to collect events; the caller closes the Listener.
func (e *Engine) Listen() (*view.Listener, error) { return e.events.Listen() }

// StopEvents ends all listening, so that a server that stops need not wait.
func (e *Engine) StopEvents() { e.events.Close(errClosing) }

// emit makes an event of the pod or one of its containers.
func (s *Sandbox) emit(id string, kind cri.ContainerEventType) {
	s.engine.events.Emit(func() *view.Event {
		return &view.Event{ID: id, Type: kind, At: time.Now(), Sandbox: s.View(), Containers: s.memberViews()}
	})
}
