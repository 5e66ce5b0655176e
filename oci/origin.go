package oci

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/version"
)

// Origin is a handler as it was when a pod was made with it. The pod keeps it, because
// only this runtime finds the state of the containers, and only in this root.
type Origin struct {
	Handler Handler `json:"Handler"`           // with an absolute Path and with a Root
	Program string  `json:"Program,omitempty"` // the name that the runtime reported; empty: not known
}

// OriginOf returns the origin of pods that are made with handler h, whose runtime
// reports a.
func OriginOf(h Handler, a *Abilities) *Origin {
	h.Path = cmp.Or(a.Path, h.Path)
	return &Origin{Handler: h, Program: a.program()}
}

// program returns the name of the runtime, or of the shim.
func (a *Abilities) program() string { return version.Program(a.Version) }

// Bind returns the runtime of pods with that origin and a handler of that name. Its
// program, root and options are those of the origin, whatever the configuration says
// now. Everything else about the handler, which concerns new containers, is as
// configured or, if the handler is no longer configured, as in the origin.
func (t *Table) Bind(name string, origin Origin) (Runtime, error) {
	key, err := json.Marshal(origin)
	if err != nil {
		return nil, err
	}
	t.changing.Lock()
	defer t.changing.Unlock()
	now := t.now.Load()
	now.mu.Lock()
	defer now.mu.Unlock()
	one := binding{name, string(key)}
	if r, ok := now.bound[one]; ok {
		return r, nil
	}
	r, err := t.bind(now, name, origin)
	if err != nil {
		return nil, err
	}
	now.bound[one] = r
	return r, nil
}

func (t *Table) bind(now *handlers, name string, origin Origin) (driver, error) {
	configured := now.byName[name]
	handler := origin.handlerAs(configured)
	known, err := readFeatures(handler.Features)
	if err != nil { // the runtime is asked instead
		slog.Warn("features file of a runtime that still has pods cannot be read", "handler", name, "err", err)
	}
	r, err := t.driver(now, name, handler, known)
	if err != nil {
		return nil, err
	}
	e := r.configured()
	e.origin = &origin
	e.successor = func() driver { return t.now.Load().byName[name] }
	if configured != nil && e.asksAs(configured.configured()) {
		e.prober.last.Store(configured.configured().prober.last.Load()) // only used for the same file
	}
	return r, nil
}

// handlerAs returns the handler of a pod while its handler is configured as configured;
// nil: it is not.
func (o *Origin) handlerAs(configured driver) Handler {
	if configured == nil {
		return o.Handler
	}
	h := configured.Handler()
	h.Type, h.Path, h.Root, h.Options, h.Features = o.Handler.Type, o.Handler.Path, o.Handler.Root, o.Handler.Options, o.Handler.Features
	return h
}

// All returns all runtimes that may have containers: those of the configuration, and
// those that pods keep. A root may be that of several.
func (t *Table) All() iter.Seq2[string, Runtime] {
	return func(yield func(string, Runtime) bool) {
		now := t.now.Load()
		for _, name := range now.names() {
			if !yield(name, now.byName[name]) {
				return
			}
		}
		for one, r := range now.kept() {
			if !yield(one.name, r) {
				return
			}
		}
	}
}

// probeOrigin is probe for a runtime that pods keep. If its program has been removed or
// replaced, that of the handler of the same name serves, provided that it is the same
// kind of runtime and so understands the state in the root.
func (h *entry) probeOrigin(ctx context.Context, ask question) (*Abilities, error) {
	a, err := h.prober.probe(ctx, h.handler.Path, ask)
	if err == nil && h.isOrigin(a) {
		return a, nil
	}
	if behind, is := errors.AsType[*behindError](err); is { // the shim itself is there
		return nil, fmt.Errorf("handler %s: %s, which the shim %s of the pod runs, is gone (%w): restore it there, or recreate the pod, which can be stopped and removed: %w",
			h.name, behind.binary, h.handler.Path, behind.cause, fault.Unavailable)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("handler %s: %w", h.name, err)
	}
	if next := h.successor(); next != nil && next.Handler().Type == h.handler.Type {
		if b, err := h.stead.probe(ctx, next.Handler().Path, ask); err == nil && h.isOrigin(b) {
			return b, nil
		}
	}
	made := cmp.Or(h.origin.Program, filepath.Base(h.handler.Path))
	lost := "is gone"
	if err == nil {
		lost = fmt.Sprintf("is now %q", a.Version)
	}
	return nil, fmt.Errorf("handler %s: %s, the %s that the pod was made with, %s: restore it there, let runtime.handlers.%s.path name another %s, or recreate the pod, which can be stopped and removed: %w",
		h.name, h.handler.Path, made, lost, h.name, made, fault.Unavailable)
}

// isOrigin reports whether a runtime is of the kind that made the containers.
func (h *entry) isOrigin(a *Abilities) bool {
	return h.origin.Program == "" || a.program() == h.origin.Program
}

// asksAs reports whether the same program gives the same answers to both.
func (h *entry) asksAs(other *entry) bool {
	return h.handler.Type == other.handler.Type && h.handler.Features == other.handler.Features && slices.Equal(h.handler.Options, other.handler.Options)
}
