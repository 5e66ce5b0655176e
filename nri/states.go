package nri

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/adaptation"

	"github.com/crius-run/crius/internal/fault"
)

// State is what the server knows about a plugin.
type State struct {
	Name      string        `json:"name"` // index-name
	Requests  uint64        `json:"requests"`
	Failures  uint64        `json:"failures"`
	LastError string        `json:"lastError,omitempty"`
	FailedAt  time.Time     `json:"failedAt,omitzero"`
	Slowest   time.Duration `json:"slowest"` // answer, in nanoseconds
}

// Report is what the server knows about its plugins.
type Report struct {
	Connected int     `json:"connected"`
	Error     string  `json:"error,omitempty"` // why none can connect
	Plugins   []State `json:"plugins"`         // all plugins that were asked anything since the server's start, by name
}

// Report returns the state of the plugins.
func (p *Plugins) Report() Report {
	if p == nil {
		return Report{}
	}
	p.states.mu.Lock()
	defer p.states.mu.Unlock()
	r := Report{Connected: int(p.active.Load()), Error: p.states.startError}
	for _, state := range p.states.byName {
		r.Plugins = append(r.Plugins, *state)
	}
	slices.SortFunc(r.Plugins, func(a, b State) int { return cmp.Compare(a.Name, b.Name) })
	return r
}

// Bounds on what is kept: plugins choose their names and errors.
const (
	maxStates = 100
	maxText   = 1 << 10 // bytes of a name, and of an error
)

func cut(text string) string { return strings.ToValidUTF8(text[:min(len(text), maxText)], "") }

type states struct {
	mu         sync.Mutex
	byName     map[string]*State
	startError string
}

// cannotStart records why there are no plugins.
func (s *states) cannotStart(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.startError = fault.Text(err)
}

// change ignores plugins beyond maxStates.
func (s *states) change(name string, f func(*State)) {
	name = cut(name)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byName == nil {
		s.byName = map[string]*State{}
	}
	state := s.byName[name]
	if state == nil {
		if len(s.byName) >= maxStates {
			return
		}
		state = &State{Name: name}
		s.byName[name] = state
	}
	f(state)
}

// metrics receives the outcome of requests from the library.
type metrics struct{ p *Plugins }

func (m metrics) RecordPluginInvocation(plugin, operation string, err error) {
	m.p.states.change(plugin, func(s *State) {
		s.Requests++
		if err != nil {
			s.Failures++
			s.LastError, s.FailedAt = cut(operation+": "+fault.Text(err)), time.Now()
		}
	})
}

func (m metrics) RecordPluginLatency(plugin, _ string, latency time.Duration) {
	m.p.states.change(plugin, func(s *State) { s.Slowest = max(s.Slowest, latency) })
}

func (m metrics) RecordPluginAdjustments(_, _ string, _ *adaptation.ContainerAdjustment, _, _ int) {}

func (m metrics) UpdatePluginCount(count int) { m.p.active.Store(int32(count)) }
