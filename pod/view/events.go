package view

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// Event reports that a pod or a container has reached a stage of its life (CRI:
// ContainerEventResponse). Its views are those of that moment.
type Event struct {
	ID         string // of the container, or of the pod itself
	Type       cri.ContainerEventType
	At         time.Time
	Sandbox    *Sandbox
	Containers []*Container // the pod's, newest first
}

// Listener receives the events from its creation on. Events about one container come in the
// order of its life; none is missing and none comes twice.
type Listener struct {
	hub  *Hub
	wake chan struct{} // holds a token while there is something to see

	mu    sync.Mutex
	queue []*Event
	ended error // error of Next when the queue is empty
}

// Hub passes events on to the listeners. It never waits for one. The zero Hub is ready for use.
type Hub struct {
	mu        sync.Mutex
	listeners map[*Listener]bool
	closed    error // why there are no listeners any more

	dropped atomic.Uint64
}

// Dropped returns how many events did not reach a listener because it was too slow. Events
// after the listener has left are not counted.
func (h *Hub) Dropped() uint64 { return h.dropped.Load() }

const (
	maxListeners = 32
	// maxQueue is how many events a listener may lag behind: as many as a full node makes when
	// all its pods are restarted.
	maxQueue = 2048
)

// Listen starts to listen; the caller closes the Listener. The error is fault.Exhausted if
// there are too many listeners, or the cause of Close.
func (h *Hub) Listen() (*Listener, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		return nil, h.closed
	}
	if len(h.listeners) >= maxListeners {
		return nil, fmt.Errorf("too many event listeners (%d): %w", maxListeners, fault.Exhausted)
	}
	l := &Listener{hub: h, wake: make(chan struct{}, 1)}
	if h.listeners == nil {
		h.listeners = map[*Listener]bool{}
	}
	h.listeners[l] = true
	return l, nil
}

// Close stops listening.
func (l *Listener) Close() {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	delete(l.hub.listeners, l)
}

// Next waits for an event. A listener that was too slow gets the events that were queued for
// it, and then fault.Exhausted: it has to list what there is and listen again. After Hub.Close
// the error is its cause.
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
		if errors.Is(l.ended, fault.Exhausted) {
			l.hub.dropped.Add(1)
		}
		return
	case len(l.queue) < maxQueue:
		l.queue = append(l.queue, event)
	default:
		l.hub.dropped.Add(1)
		l.ended = fmt.Errorf("client too slow: %d events queued, further ones dropped; list pods and containers, then subscribe again: %w", maxQueue, fault.Exhausted)
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

// Emit passes the event that describe returns on to all listeners. If there are none, describe
// is not called. Events arrive in the order of the calls.
func (h *Hub) Emit(describe func() *Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.listeners) == 0 {
		return
	}
	event := describe()
	for l := range h.listeners {
		l.put(event)
	}
}

// Close ends all listeners: Next returns cause once the earlier events are taken.
func (h *Hub) Close(cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = cause
	for l := range h.listeners {
		l.end(cause)
	}
}

// Stage is how far an object has come in its life, as events report it.
type Stage int

// Stages in the order in which they are reached.
const (
	Unknown Stage = iota // none has been reached
	Created
	Started
	Stopped
	Deleted
)

// Progress makes events from an object's changes, even from concurrent ones: the reported stage
// only grows, one at a time. The zero Progress is ready for use.
type Progress struct {
	mu       sync.Mutex
	reported Stage
}

// Reach calls emit for each stage up to now that was not reported yet, in order, except for
// skip.
func (p *Progress) Reach(now, skip Stage, emit func(cri.ContainerEventType)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.reported < now {
		p.reported++
		if p.reported != skip {
			emit(cri.ContainerEventType(p.reported - Created))
		}
	}
}
