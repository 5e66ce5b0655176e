package pod

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// Event tells that a pod or a container has reached a stage of its life (CRI:
// ContainerEventResponse). Views are those of that moment.
type Event struct {
	ID         string // of the container, or of the pod itself
	Type       cri.ContainerEventType
	At         time.Time
	Sandbox    *SandboxView
	Containers []*ContainerView // the pod's, newest first
}

// Listener gets the events from its making on. Those about one container come
// in the order of its life, none is left out and none comes twice.
type Listener struct {
	hub  *hub
	wake chan struct{} // holds a token while there is something to see

	mu    sync.Mutex
	queue []*Event
	ended error // what Next says when the queue is empty
}

// hub passes events on to the listeners. It never waits for one.
type hub struct {
	mu        sync.Mutex
	listeners map[*Listener]bool
	closed    bool
}

const (
	maxListeners = 32
	// maxQueue is how many events a listener may be behind: what a full node
	// makes when all its pods are restarted.
	maxQueue = 2048
)

// Listen begins to listen; the caller closes the Listener.
func (e *Engine) Listen() (*Listener, error) {
	h := &e.events
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, errClosing
	}
	if len(h.listeners) >= maxListeners {
		return nil, fmt.Errorf("%d clients listen for events already: %w", maxListeners, fault.Exhausted)
	}
	l := &Listener{hub: h, wake: make(chan struct{}, 1)}
	if h.listeners == nil {
		h.listeners = map[*Listener]bool{}
	}
	h.listeners[l] = true
	return l, nil
}

// Close ends the listening.
func (l *Listener) Close() {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	delete(l.hub.listeners, l)
}

// Next waits for an event. A listener that was too slow gets what it was kept
// and then fault.Exhausted: it has to list what there is, and listen anew. When
// the engine closes it is fault.Unavailable.
func (l *Listener) Next(ctx context.Context) (*Event, error) {
	for {
		if event, err := l.take(); event != nil || err != nil {
			return event, err
		}
		select {
		case <-l.wake:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (l *Listener) take() (*Event, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		return nil, l.ended
	}
	event := l.queue[0]
	l.queue = l.queue[1:]
	return event, nil
}

func (l *Listener) put(event *Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.ended != nil:
		return
	case len(l.queue) < maxQueue:
		l.queue = append(l.queue, event)
	default:
		l.ended = fmt.Errorf("%d events were not taken, and more are lost: list what there is, then listen anew: %w", maxQueue, fault.Exhausted)
	}
	l.stir()
}

func (l *Listener) end(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended == nil {
		l.ended = cause
	}
	l.stir()
}

func (l *Listener) stir() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// StopEvents ends all listening, so that a server that stops need not wait.
func (e *Engine) StopEvents() {
	h := &e.events
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for l := range h.listeners {
		l.end(errClosing)
	}
}

// stage is how much of an object's life has been told.
type stage int

const (
	untold stage = iota
	created
	started
	stopped
	deleted
)

// teller makes events of an object's changes, whoever made them and however
// many at once: what was told only grows, a step at a time.
type teller struct {
	mu   sync.Mutex
	told stage
}

// reach tells of the stages up to one that has been reached, but for those that
// are skipped.
func (t *teller) reach(now stage, skip stage, tell func(cri.ContainerEventType)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.told < now {
		t.told++
		if t.told != skip {
			tell(cri.ContainerEventType(t.told - created))
		}
	}
}

// tell makes known what has become of the container since it was called last.
func (c *Container) tell() {
	now, skip := c.stage()
	c.teller.reach(now, skip, func(kind cri.ContainerEventType) { c.sandbox.emit(c.id, kind) })
}

// stage is how far the container has come. One whose program has ended before
// it was known to run is told of when both are known; one that could never be
// started has skipped a stage.
func (c *Container) stage() (now, skip stage) {
	at := c.now()
	switch {
	case at.gone:
		now = deleted
	case at.exit != nil && (at.Phase != phaseStarting || at.StartError != ""):
		now = stopped
	case at.Phase == phaseStarted:
		now = started
	default:
		now = created
	}
	if at.StartedAt.IsZero() {
		skip = started
	}
	return now, skip
}

// tell makes known what has become of the pod.
func (s *Sandbox) tell() {
	now, at := started, s.now() // a pod is, or is not
	switch {
	case at.gone:
		now = deleted
	case s.ending.Err() != nil || at.Phase != phaseReady:
		now = stopped
	}
	s.teller.reach(now, untold, func(kind cri.ContainerEventType) { s.emit(s.id, kind) })
}

// emit makes an event of the pod or one of its containers.
func (s *Sandbox) emit(id string, kind cri.ContainerEventType) {
	h := &s.engine.events
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.listeners) == 0 {
		return
	}
	event := &Event{ID: id, Type: kind, At: time.Now(), Sandbox: s.view.Load(), Containers: s.memberViews()}
	for l := range h.listeners {
		l.put(event)
	}
}

// memberViews are the pod's containers, newest first.
func (s *Sandbox) memberViews() []*ContainerView {
	var views []*ContainerView
	for _, c := range s.now().containers {
		views = append(views, c.view.Load())
	}
	slices.SortFunc(views, func(a, b *ContainerView) int { return b.CreatedAt.Compare(a.CreatedAt) })
	return views
}

// SandboxContainers are the containers of a pod, newest first.
func (e *Engine) SandboxContainers(id string) ([]*ContainerView, error) {
	s, err := e.sandboxes.find(id)
	if err != nil {
		return nil, err
	}
	return s.memberViews(), nil
}
