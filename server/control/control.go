// Package control has the operator's commands for a node as a whole: compare it
// with its records, wipe it, remove what other runtimes have left in its image
// store, and reload the server's configuration. A Node executes them for a
// caller that owns the node. A Server accepts them over HTTP on a unix socket
// that only root can open, and a Client sends them.
package control

import (
	"context"
	"errors"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/foreign"
)

// Checked is the result of a comparison.
type Checked struct {
	Pods       int             `json:"pods"` // number that was checked
	Containers int             `json:"containers"`
	Findings   []audit.Finding `json:"findings"`
	// OpaqueIPAM are the IPAM plugins whose reservations only they can read.
	OpaqueIPAM []string `json:"opaqueIPAM,omitempty"`
	// Incomplete says what could not be checked.
	Incomplete string `json:"incomplete,omitempty"`
}

// Holdings are what a wipe would remove.
type Holdings struct {
	Pods           int    `json:"pods"`
	Containers     int    `json:"containers"`
	Images         int    `json:"images"`
	ImageBytes     uint64 `json:"imageBytes"`
	ContainerBytes uint64 `json:"containerBytes"`
}

// Wiped is what a wipe could not remove.
type Wiped struct {
	Left   []audit.Finding `json:"left"`   // what remains, and is on record
	Errors []string        `json:"errors"` // why something could not even be tried
}

// Reloaded are the keys of options that differ from those in force.
type Reloaded struct {
	Changed []string `json:"changed"` // in force from now on
	Later   []string `json:"later"`   // in force after a restart
}

// ForeignRemoved is the result of a removal of other runtimes' containers.
type ForeignRemoved struct {
	Removed []foreign.Container `json:"removed"`
	Kept    []foreign.Container `json:"kept"` // each says why
}

// Done reports whether nothing remains.
func (w Wiped) Done() bool { return len(w.Left)+len(w.Errors) == 0 }

// Node executes the commands.
type Node struct {
	Engine *pod.Engine
	Store  *storage.Store
	Reload func(context.Context) (Reloaded, error) // nil: no server runs with a configuration
}

// Check compares the node with its records, and with repair repairs it.
func (n Node) Check(ctx context.Context, repair bool) (Checked, error) {
	return n.checked(n.Engine.Audit().Verify(ctx, repair))
}

// Inspect is Check for an engine that has not recovered, and changes nothing.
func (n Node) Inspect(ctx context.Context) (Checked, error) {
	return n.checked(n.Engine.Inspect(ctx))
}

func (n Node) checked(findings []audit.Finding, err error) (Checked, error) {
	c := Checked{
		Pods: len(n.Engine.Sandboxes()), Containers: len(n.Engine.Containers()),
		Findings: append([]audit.Finding{}, findings...), OpaqueIPAM: n.Engine.Audit().OpaqueIPAM(),
	}
	if err != nil {
		c.Incomplete = fault.Text(err)
	}
	return c, nil
}

// Holdings counts what a wipe would remove.
func (n Node) Holdings(ctx context.Context) (Holdings, error) {
	var h Holdings
	var err error
	if h.Pods, h.Containers, err = n.Engine.Audit().Records.Count(); err != nil {
		return h, err
	}
	images, err := n.Store.Images(ctx)
	if err != nil {
		return h, err
	}
	for _, image := range images {
		if !image.ReadOnly {
			h.Images++
		}
	}
	used, written, err := n.Store.FsInfo(ctx)
	h.ImageBytes, h.ContainerBytes = used.UsedBytes, written.UsedBytes
	return h, err
}

// Wipe removes all pods and containers, and also images unless keepImages is
// set.
func (n Node) Wipe(ctx context.Context, keepImages bool) (Wiped, error) {
	left, err := n.Engine.Wipe(ctx)
	w := Wiped{Left: append([]audit.Finding{}, left...), Errors: texts(err)}
	if keepImages {
		return w, nil
	}
	images, err := n.Store.Images(ctx)
	errs := []error{err}
	for _, image := range images {
		if err := context.Cause(ctx); err != nil { // the server is stopping
			errs = append(errs, err)
			break
		}
		if !image.ReadOnly {
			errs = append(errs, n.Store.Remove(ctx, image.ID))
		}
	}
	w.Errors = append(w.Errors, texts(errs...)...)
	return w, nil
}

// Foreign lists the containers of other runtimes in the image store, with
// measure including their sizes.
func (n Node) Foreign(ctx context.Context, measure bool) ([]foreign.Container, error) {
	return n.Store.Foreign.List(ctx, measure)
}

// RemoveForeign removes them (foreign.Containers.Remove).
func (n Node) RemoveForeign(ctx context.Context, ids []string) (r ForeignRemoved, err error) {
	r.Removed, r.Kept, err = n.Store.Foreign.Remove(ctx, ids)
	return r, err
}

func texts(errs ...error) []string {
	all := []string{}
	for _, err := range errs {
		if err != nil {
			all = append(all, fault.Text(err))
		}
	}
	return all
}

// ErrRefused means that the server did not accept the request as valid.
var ErrRefused = errors.New("the server refused the request")
