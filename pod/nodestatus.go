package pod

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/refresh"
	"github.com/crius-run/crius/oci"
	"github.com/crius-run/crius/pod/view"
)

// The node's status is kept up to date beside the kubelet's calls
// (docs/decisions/0037-status.md).
const (
	// runtimePeriod and networkPeriod are how long a change that nothing announces may
	// go unnoticed. A look at the network may run plugins, by CNI's verb STATUS.
	runtimePeriod = 2 * time.Second
	networkPeriod = 5 * time.Second
	// statusWait is how long a call waits for a new check if the last one said not ready.
	statusWait = 3 * time.Second
	// firstWait is how long one waits that comes before the first look has ended, which
	// takes as long as runtimes and plugins may.
	firstWait = 15 * time.Second
)

// nodeStatus has the answers to RuntimeStatus and NetworkStatus.
type nodeStatus struct {
	runtime *refresh.Value[view.RuntimeStatus]
	network *refresh.Value[view.NetworkStatus]
}

func (e *Engine) newNodeStatus() nodeStatus {
	return nodeStatus{
		runtime: refresh.New(func(ctx context.Context) view.RuntimeStatus {
			table := e.deps.Runtimes.Version()
			return view.RuntimeStatus{Table: table, NotReady: e.runtimeReady(ctx), Handlers: e.handlers.list(ctx)}
		}),
		network: refresh.New(func(ctx context.Context) view.NetworkStatus {
			return view.NetworkStatus{NotReady: e.deps.Network.Ready(ctx)}
		}),
	}
}

// watchNode begins to keep the node's status up to date. It is for the first reader
// to call, for a program that only looks at records has none.
func (e *Engine) watchNode() {
	keep := func(work string, run func(context.Context, time.Duration), period time.Duration) {
		e.background.Go(work, func() { e.background.Insist(work, func() { run(e.background.Closing(), period) }) })
	}
	keep("runtime status", e.status.runtime.Run, runtimePeriod)
	keep("network status", e.status.network.Run, networkPeriod)
}

// RuntimeStatus says whether containers of the default handler can be run, and which
// handlers this node offers; readers share the answer. It is at most runtimePeriod
// old, plus the time that runtimes take to answer. Where the runtime was not ready
// the answer is that of now.
func (e *Engine) RuntimeStatus(ctx context.Context) (*view.RuntimeStatus, error) {
	e.watching.Do(e.watchNode)
	version := e.deps.Runtimes.Version()
	return current(ctx, e.status.runtime, func(s *view.RuntimeStatus) bool { return s.NotReady == nil && s.Table == version })
}

// NetworkStatus says whether pods can be given a network, as RuntimeStatus does; it
// is at most networkPeriod old.
func (e *Engine) NetworkStatus(ctx context.Context) (*view.NetworkStatus, error) {
	e.watching.Do(e.watchNode)
	return current(ctx, e.status.network, func(s *view.NetworkStatus) bool { return s.NotReady == nil })
}

// current is the last answer if that will do, else a new one or, if that takes longer
// than statusWait, the last one all the same.
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

// runtimeReady says why containers of the default handler cannot be run now: its
// runtime or the monitor is missing or broken, or the store is not ready. Other
// handlers do not count (they are left out of the list): the pod that installs one
// may have to run first. The text stays the same for as long as the cause does.
func (e *Engine) runtimeReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, oci.StatusTime)
	defer cancel()
	return errors.Join(e.deps.Images.Ready(ctx), e.deps.Runtimes.Ready(ctx))
}
