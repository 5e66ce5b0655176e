package pod

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/oci"
)

// handlers is what the node's runtimes can do for pods.
type handlers struct {
	runtimes Runtimes
	images   Images
	mapping  mapping
}

// list is Engine.Handlers.
func (h *handlers) list(ctx context.Context) []*cri.RuntimeHandler {
	ctx, cancel := context.WithTimeout(ctx, oci.StatusTime)
	defer cancel()
	names := append([]string{""}, h.runtimes.Names()...)
	found := make([]*cri.RuntimeHandler, len(names))
	var group panics.Group // side by side: a runtime may hang
	for i, name := range names {
		group.Go(func() { found[i] = h.offered(ctx, name) })
	}
	group.Wait()
	return slices.DeleteFunc(found, func(one *cri.RuntimeHandler) bool { return one == nil })
}

// offered is nil for a handler that is not offered now.
func (h *handlers) offered(ctx context.Context, name string) *cri.RuntimeHandler {
	abilities, err := h.probe(ctx, name)
	if err != nil && name != "" && name != h.runtimes.Default() {
		return nil
	}
	features := &cri.RuntimeHandlerFeatures{}
	if err == nil {
		features.RecursiveReadOnlyMounts = abilities.RecursiveReadOnly
		features.UserNamespaces = h.canMap(name, abilities) == nil
	}
	return &cri.RuntimeHandler{Name: name, Features: features}
}

// probe says what pods of a handler may ask for, or why it makes none now.
func (h *handlers) probe(ctx context.Context, handler string) (*oci.Abilities, error) {
	runtime, err := h.runtimes.Get(handler)
	if err != nil {
		return nil, err
	}
	if err := h.runtimes.MonitorReady(); err != nil {
		return nil, err
	}
	return runtime.Probe(ctx)
}

// canMap says why a handler's pods cannot have user namespaces of their own:
// both their volumes, which the runtime mounts, and their root file systems,
// which the kernel puts together, need id-mapped mounts.
func (h *handlers) canMap(handler string, abilities *oci.Abilities) error {
	if !abilities.IDMap {
		return fmt.Errorf("userns_options: runtime handler %q (%s) does not support ID-mapped mounts, which user namespaces need; use runc 1.2, crun 1.9 or later: %w",
			handler, abilities.Version, fault.Unimplemented)
	}
	if err := h.mapping.check(h.images.CheckMapping); err != nil {
		return fmt.Errorf("userns_options: %w", err)
	}
	return nil
}

// mapping remembers whether the node can id-map the layers of images. To find
// out takes some milliseconds, and the answer holds for as long as the node is
// up, unless there was none.
type mapping struct {
	mu       sync.Mutex
	answered bool
	answer   error
}

func (m *mapping) check(ask func(userNS string) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.answered {
		return m.answer
	}
	err := ns.WithUser([]ns.IDMap{{Container: 0, Host: 1 << 16, Size: 1}}, ask)
	if err == nil || errors.Is(err, fault.Unimplemented) {
		m.answered, m.answer = true, err
	}
	return err
}
