package foreign

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/internal/tree"
	"github.com/crius-run/crius/storage/durable"
)

// Containers are the containers of other runtimes in a store. Its methods are safe for concurrent
// use.
type Containers struct {
	Store cstorage.Store
	Locks *durable.Locks
	Own   func(*cstorage.Container) bool // reports whether a record is crius's own
	Owned func() error                   // says why this process may not change the store; nil: it may
}

// List returns the containers, sorted by pod and age. With measure it also walks the writable layer
// of each that is not in use.
func (a *Containers) List(ctx context.Context, measure bool) ([]Container, error) {
	if err := a.Locks.Await(ctx, durable.ToRead); err != nil {
		return nil, err
	}
	list, err := a.read()
	if err != nil || !measure {
		return list, err
	}
	for i := range list {
		if list[i].Kept != "" {
			continue
		}
		used := tree.Usage{Stop: func() bool { return ctx.Err() != nil }}
		err := used.Add(filepath.Join(a.Store.GraphRoot(), a.Store.GraphDriverName(), list[i].Layer, "diff"))
		if errors.Is(err, tree.ErrStopped) {
			return nil, context.Cause(ctx)
		}
		list[i].Bytes = used.Bytes // as far as it could be counted
	}
	return list, nil
}

// Remove removes containers with their writable layers. It returns the removed ones, and the others
// with the reason in Kept: a container that is in use is never removed. If one of the ids is not
// that of a container, it removes nothing.
func (a *Containers) Remove(ctx context.Context, ids []string) (removed, kept []Container, err error) {
	if err := a.Owned(); err != nil {
		return nil, nil, err
	}
	list, err := a.List(ctx, false)
	if err != nil {
		return nil, nil, err
	}
	chosen := make([]Container, len(ids))
	for i, id := range ids {
		at := slices.IndexFunc(list, func(c Container) bool { return c.ID == id })
		if at < 0 {
			return nil, nil, fmt.Errorf("container %q is not one of another runtime: %w", id, fault.NotFound)
		}
		chosen[i] = list[at]
	}
	for _, c := range chosen {
		if c.Kept == "" {
			c.Kept = a.remove(ctx, c.ID)
		}
		if c.Kept == "" {
			removed = append(removed, c)
		} else {
			kept = append(kept, c)
		}
	}
	return removed, kept, nil
}

// remove removes one container. It returns the reason if that failed.
func (a *Containers) remove(ctx context.Context, id string) (why string) {
	if err := a.Locks.Await(ctx, durable.ToWrite); err != nil {
		return err.Error()
	}
	// The library would unmount it, and somebody may have mounted it after it was listed.
	if why := a.mounted(id); why != "" {
		return why
	}
	err := trace.Call(ctx, "remove foreign container", func() error { return a.Store.DeleteContainer(id) })
	if err != nil && !errors.Is(err, cstorage.ErrNotAContainer) {
		return err.Error()
	}
	return ""
}
