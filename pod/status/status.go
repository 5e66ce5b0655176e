// Package status reports what the node can do now: whether pods can be run and given a network,
// and which handlers may run them. The answers are kept up to date in the background
// (docs/decisions/0037-status.md).
package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/background"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/refresh"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/view"
)

const (
	// runtimePeriod and networkPeriod are how long a change that nothing announces may go
	// unnoticed. A check of the network may run plugins, by CNI's verb STATUS.
	runtimePeriod = 2 * time.Second
	networkPeriod = 5 * time.Second
	// statusWait is how long a call waits for a new check if the last one said not ready.
	statusWait = 3 * time.Second
	// firstWait is how long a call waits that comes before the first check has ended, which
	// takes as long as runtimes and plugins may.
	firstWait = 15 * time.Second
)

// Runtimes is the table of handlers.
type Runtimes interface {
	Get(name string) (oci.Runtime, error)
	Bind(name string, origin oci.Origin) (oci.Runtime, error)
	All() iter.Seq2[string, oci.Runtime]
	Names() []string
	Default() string
	Version() uint64
	Ready(ctx context.Context) error
	MonitorReady() error
}

// Images is what is needed of storage.
type Images interface {
	Ready(ctx context.Context) error
	CheckMapping(userNS string) error
}

// Network is what is needed of CNI.
type Network interface {
	Ready(ctx context.Context) error
	Grace() error
}

// Node has the answers.
type Node struct {
	runtimes Runtimes
	images   Images
	cgroups  func() error
	mapping  mapping
	runtime  *refresh.Value[view.RuntimeStatus]
	network  *refresh.Value[view.NetworkStatus]
	checks   *background.Group
	watching sync.Once
	notReady bool // as logged last; used by the look at the runtime, of which there is one at a time
}

// New returns a Node. cgroups returns why pods cannot have cgroups. The checks run in checks, from
// the first question on.
func New(runtimes Runtimes, images Images, network Network, cgroups func() error, checks *background.Group) *Node {
	n := &Node{runtimes: runtimes, images: images, cgroups: cgroups, checks: checks}
	n.runtime = refresh.New(func(ctx context.Context) view.RuntimeStatus {
		table := runtimes.Version()
		err := n.runtimeReady(ctx)
		n.tell(ctx, err)
		return view.RuntimeStatus{Table: table, NotReady: err, Handlers: n.Handlers(ctx), CgroupDelegation: delegates(ctx), Seccomp: spec.HasSeccomp()}
	})
	n.network = refresh.New(func(ctx context.Context) view.NetworkStatus {
		err := network.Ready(ctx)
		return view.NetworkStatus{NotReady: err, Grace: network.Grace()}
	})
	return n
}

// delegates reports whether a container can be given a writable cgroup mount.
func delegates(ctx context.Context) bool {
	if cgroup.Detect() != cgroup.V2 {
		return false
	}
	options, err := cgroup.Options()
	if err != nil {
		slog.WarnContext(ctx, "cannot read the options of the cgroup mount", "err", err)
	}
	return slices.Contains(options, cgroup.NSDelegate)
}

// tell logs once that containers cannot be run, for err, and once that they can again.
func (n *Node) tell(ctx context.Context, err error) {
	switch {
	case ctx.Err() != nil || n.notReady == (err != nil):
		return
	case err != nil:
		slog.WarnContext(ctx, "runtime is not ready", "err", err)
	default:
		slog.InfoContext(ctx, "runtime is ready again")
	}
	n.notReady = err != nil
}

// Watch starts to keep the answers up to date, and has the log say what keeps pods from running
// before anybody asks.
func (n *Node) Watch() { n.watching.Do(n.watch) }

// watch starts to keep the answers up to date. The first reader calls it: a program that only
// looks at records has none.
func (n *Node) watch() {
	keep := func(work string, run func(context.Context, time.Duration), period time.Duration) {
		n.checks.Go(work, func() { n.checks.Insist(work, func() { run(n.checks.Closing(), period) }) })
	}
	keep("runtime status", n.runtime.Run, runtimePeriod)
	keep("network status", n.network.Run, networkPeriod)
}

// RuntimeStatus reports whether containers of the default handler can be run, and which
// handlers this node offers; readers share the answer. It is at most runtimePeriod old, plus
// the time that runtimes take to answer. If the runtime was not ready, the answer is a new one.
func (n *Node) RuntimeStatus(ctx context.Context) (*view.RuntimeStatus, error) {
	n.watching.Do(n.watch)
	version := n.runtimes.Version()
	return current(ctx, n.runtime, func(s *view.RuntimeStatus) bool { return s.NotReady == nil && s.Table == version })
}

// NetworkStatus reports whether pods can be given a network, like RuntimeStatus; it is at most
// networkPeriod old.
func (n *Node) NetworkStatus(ctx context.Context) (*view.NetworkStatus, error) {
	n.watching.Do(n.watch)
	return current(ctx, n.network, func(s *view.NetworkStatus) bool { return s.NotReady == nil })
}

// Last returns the last answers, for readers that must not wait; nil: there is none yet.
func (n *Node) Last() (*view.RuntimeStatus, *view.NetworkStatus) {
	n.watching.Do(n.watch)
	return n.runtime.Last(), n.network.Last()
}

// current returns the last answer if willDo accepts it, otherwise a new one or, if that takes
// longer than statusWait, the last one all the same.
func current[T any](ctx context.Context, v *refresh.Value[T], willDo func(*T) bool) (*T, error) {
	last := v.Last()
	if last != nil && willDo(last) {
		return last, nil
	}
	limit := statusWait
	if last == nil {
		limit = firstWait
	}
	wait, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	last = v.Fresh(wait)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if last == nil {
		return nil, fmt.Errorf("the node's status is not known yet: %w", fault.Unavailable)
	}
	return last, nil
}

// runtimeReady returns why containers of the default handler cannot be run now: its runtime or
// the monitor is missing or broken, the store is not ready, or there can be no cgroups. Other handlers do not count
// (they are left out of the list): the pod that installs one may have to run first. The text
// stays the same for as long as the cause does.
func (n *Node) runtimeReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, oci.StatusTime)
	defer cancel()
	return errors.Join(n.images.Ready(ctx), n.runtimes.Ready(ctx), n.cgroups())
}

// Handlers lists the RuntimeClass handlers that this node offers now in alphabetical order,
// after the default one under its other name "" (CRI: RuntimeHandler.name). It leaves out a
// handler whose runtime cannot be used, or does not report its features within oci.StatusTime.
// The default handler is always listed, without features then.
func (n *Node) Handlers(ctx context.Context) []*cri.RuntimeHandler {
	ctx, cancel := context.WithTimeout(ctx, oci.StatusTime)
	defer cancel()
	names := append([]string{""}, n.runtimes.Names()...)
	found := make([]*cri.RuntimeHandler, len(names))
	var group panics.Group // concurrently, since a runtime may hang
	for i, name := range names {
		group.Go(func() { found[i] = n.offered(ctx, name) })
	}
	group.Wait()
	return slices.DeleteFunc(found, func(one *cri.RuntimeHandler) bool { return one == nil })
}

// offered returns nil for a handler that is not offered now.
func (n *Node) offered(ctx context.Context, name string) *cri.RuntimeHandler {
	abilities, err := n.Probe(ctx, name)
	if err != nil && name != "" && name != n.runtimes.Default() {
		return nil
	}
	features := &cri.RuntimeHandlerFeatures{}
	if err == nil {
		features.RecursiveReadOnlyMounts = abilities.RecursiveReadOnly
		features.UserNamespaces = n.CanMap(name, abilities) == nil
		features.CgroupNamespaces = abilities.CgroupNamespaces && !abilities.Sandboxed
	}
	return &cri.RuntimeHandler{Name: name, Features: features}
}

// Probe returns what pods of a handler may ask for, or why the handler cannot run pods now.
func (n *Node) Probe(ctx context.Context, handler string) (*oci.Abilities, error) {
	_, abilities, err := n.Runtime(ctx, handler)
	return abilities, err
}

// Runtime returns the runtime of a handler as it is configured now, and what Probe returns of it.
func (n *Node) Runtime(ctx context.Context, handler string) (oci.Runtime, *oci.Abilities, error) {
	runtime, err := n.runtimes.Get(handler)
	if err != nil {
		return nil, nil, err
	}
	if err := n.runtimes.MonitorReady(); err != nil {
		return nil, nil, err
	}
	abilities, err := runtime.Probe(ctx)
	if err != nil {
		return nil, nil, err
	}
	return runtime, abilities, abilities.CanServe(cmp.Or(handler, n.runtimes.Default()), runtime.Handler())
}

// CanMap returns why a handler's pods cannot have user namespaces of their own: both their
// volumes, which the runtime mounts, and their root file systems, which the kernel puts
// together, need id-mapped mounts.
func (n *Node) CanMap(handler string, abilities *oci.Abilities) error {
	if !abilities.IDMap {
		return fmt.Errorf("userns_options: runtime handler %q (%s) does not support ID-mapped mounts, which user namespaces need; use runc 1.2, crun 1.9 or later: %w",
			handler, abilities.Version, fault.Unimplemented)
	}
	if err := n.mapping.check(n.images.CheckMapping); err != nil {
		return fmt.Errorf("userns_options: %w", err)
	}
	return nil
}

// mapping remembers whether the node can id-map the layers of images. The check takes some
// milliseconds. Its result is valid as long as the node is up, unless the check failed.
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
