package pod

import (
	"context"
	"path/filepath"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/audit"
)

// pinPrefix is what the names of pinned namespaces begin with.
const pinPrefix = "crius-"

// known is what the engine tells those who search for what is not on record.
type known struct{ engine *Engine }

// orphans searches for what bears an id that belongs to nothing on record.
func (e *Engine) orphans(ctx context.Context, report *audit.Report) error {
	search := audit.Search{
		Layout: audit.Layout{
			StateDir: e.cfg.StateDir, RunDir: e.cfg.RunDir,
			NamespacesDir: e.cfg.NamespacesDir, PinPrefix: pinPrefix, CgroupPrefix: e.cfg.CgroupPrefix,
			Foreign: func(id string) bool { return ids.Foreign(id, e.mark) },
		},
		Runtimes: e.deps.Runtimes, Network: e.deps.Network, Node: known{e},
	}
	return search.Orphans(ctx, report)
}

// Knows implements audit.Node.
func (k known) Knows(id string) bool {
	return k.engine.sandboxes.Knows(id) || k.engine.containers.Knows(id) || k.engine.cleanups.Has(id) || k.engine.records.Has(id)
}

// CgroupParents implements audit.Node, with the one that a pod without one in its
// request would have.
func (k known) CgroupParents() []string {
	var parents []string
	note := func(_, name string, err error) {
		if err == nil && name != "" && filepath.Dir(name) != "/" {
			parents = append(parents, filepath.Dir(name))
		}
	}
	note(k.engine.cfg.cgroupOf(nil, "", "0"))
	for _, pod := range k.engine.sandboxes.All() {
		note(k.engine.cfg.cgroupOf(pod.plan.Config.M, "", "0"))
	}
	return parents
}

// Attachments implements audit.Node.
func (k known) Attachments() []*network.Attachment {
	var all []*network.Attachment
	for _, s := range k.engine.sandboxes.All() {
		if a := s.now().Network; a != nil {
			all = append(all, a)
		}
	}
	return all
}

// NetworkNamespaces implements audit.Node.
func (k known) NetworkNamespaces() []string {
	var paths []string
	for _, s := range k.engine.sandboxes.All() {
		paths = append(paths, s.plan.Namespaces.Paths().Net)
	}
	return paths
}

// Sweep implements audit.Node.
func (k known) Sweep(ctx context.Context, id string) error { return k.engine.sweep(ctx, id) }
