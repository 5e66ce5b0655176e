package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/owner"
	"github.com/crius-run/crius/oci/pullcgroup"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/server/control"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/foreign"
)

// keeper checks and wipes the node as a whole.
type keeper interface {
	Check(ctx context.Context, repair bool) (control.Checked, error)
	Holdings(ctx context.Context) (control.Holdings, error)
	Wipe(ctx context.Context, keepImages bool) (control.Wiped, error)
	Foreign(ctx context.Context, measure bool) ([]foreign.Container, error)
	RemoveForeign(ctx context.Context, ids []string) (control.ForeignRemoved, error)
}

// findLooker is findKeeper for callers that change nothing. It does not create the lock if
// no server has ever run.
func findLooker(ctx context.Context, cfg config.Config) (_ keeper, release func() error, err error) {
	if neverLocked(cfg) {
		return newStandIn(cfg), func() error { return nil }, nil
	}
	return findKeeper(ctx, cfg)
}

// findKeeper returns the running server, or a stand-in that keeps the state locked until
// release, so that no server can start in the meantime.
func findKeeper(ctx context.Context, cfg config.Config) (_ keeper, release func() error, err error) {
	unlock, err := lockRoots(ctx, cfg, 0)
	taken := new(owner.TakenError)
	switch {
	case errors.As(err, &taken), errors.Is(err, pod.ErrLevel):
		return nil, nil, err
	case errors.Is(err, fault.Precondition):
		// The server of this root may have been started with another run root, and the
		// server of this run root may have another root.
		if err := pod.RunIsOurs(cfg.RunRoot, cfg.Root); err != nil {
			return nil, nil, err
		}
		return control.NewClient(controlSocket(cfg)), func() error { return nil }, nil
	case err != nil:
		return nil, nil, err
	}
	return newStandIn(cfg), unlock, nil
}

// lockRoots locks the roots for this process. If a later crius has used them, the error is
// pod.ErrLevel. If a server of the same root has them, the
// error is fault.Precondition; if another crius has the run root, it is an
// *owner.TakenError.
func lockRoots(ctx context.Context, cfg config.Config, patience time.Duration) (unlock func() error, err error) {
	state, err := pod.Lock(ctx, cfg.Root, patience)
	if err != nil {
		return nil, err
	}
	if err := pod.CheckLevel(cfg.Root); err != nil {
		return nil, errors.Join(err, state.Close())
	}
	run, err := pod.LockRun(ctx, cfg.RunRoot, cfg.Root, patience)
	if err != nil {
		return nil, errors.Join(err, state.Close())
	}
	return func() error { return errors.Join(run.Close(), state.Close()) }, nil
}

// standIn does the work of a server if none is running.
type standIn struct {
	cfg   config.Config
	looks bool // it changes nothing
}

// newStandIn returns a stand-in with SELinux disabled. It creates no pods, and so needs no
// labels: it works even if the SELinux policy has no types for containers, so that no
// server starts.
func newStandIn(cfg config.Config) standIn {
	cfg.Pod.SELinux = false
	return standIn{cfg: cfg}
}

// node opens the backends and an engine that uses them.
func (s standIn) node(ctx context.Context) (_ control.Node, end func() error, err error) {
	if s.looks {
		s.cfg.Pod.AppArmorProfile = "" // so that it is not loaded
	}
	backends, err := openBackends(ctx, s.cfg, s.image(), nil)
	if err != nil {
		return control.Node{}, nil, err
	}
	engine, _, err := backends.engine(ctx)
	if err != nil {
		closing(&err, func() error { return backends.Close(ctx) })
		return control.Node{}, nil, err
	}
	end = func() error { return errors.Join(bounded(ctx, engine.Close), backends.Close(ctx)) }
	return control.Node{Engine: engine, Store: backends.store}, end, nil
}

func (s standIn) image() storage.Options {
	options := imageOptions(s.cfg)
	options.ReadOnly = s.looks
	return options
}

// inspect checks the node without changing anything.
func (s standIn) inspect(ctx context.Context) (checked control.Checked, err error) {
	s.looks = true
	node, end, err := s.node(ctx)
	if err != nil {
		return checked, err
	}
	defer closing(&err, end)
	return node.Inspect(ctx)
}

// Check compares the node with its records. With repair it first recovers as a starting
// server would.
func (s standIn) Check(ctx context.Context, repair bool) (checked control.Checked, err error) {
	before, err := s.inspect(ctx)
	if err != nil || !repair {
		return before, err
	}
	node, end, err := s.recovered(ctx)
	if err != nil {
		return before, err
	}
	defer closing(&err, end)
	checked, err = node.Check(ctx, true)
	checked.Findings = audit.Mended(before.Findings, checked.Findings)
	return checked, err
}

func (s standIn) recovered(ctx context.Context) (control.Node, func() error, error) {
	node, end, err := s.node(ctx)
	if err != nil {
		return node, nil, err
	}
	if err := node.Engine.Recover(ctx); err != nil {
		err = fmt.Errorf("recover: %w", err)
		closing(&err, end)
		return node, nil, err
	}
	pullcgroup.New(pullCgroupOf(s.cfg)).Recover(ctx, node.Engine.CgroupParents())
	return node, end, nil
}

func (s standIn) Holdings(ctx context.Context) (holdings control.Holdings, err error) {
	s.looks = true
	node, end, err := s.node(ctx)
	if err != nil {
		return holdings, err
	}
	defer closing(&err, end)
	return node.Holdings(ctx)
}

// Wipe also removes the directories once they record no more objects.
func (s standIn) Wipe(ctx context.Context, keepImages bool) (wiped control.Wiped, err error) {
	node, end, err := s.recovered(ctx)
	if err != nil {
		return wiped, err
	}
	wiped, err = node.Wipe(ctx, keepImages)
	if err == nil && wiped.Done() && !keepImages {
		err = node.Store.Forget()
	}
	if err = errors.Join(err, end()); err != nil || !wiped.Done() {
		return wiped, err
	}
	return wiped, errors.Join(removeParents(ctx, s.cfg), placeFacade(s.cfg.RunRoot, ""), rootsOf(s.cfg).remove())
}

// Foreign lists containers of other runtimes, which needs no engine.
func (s standIn) Foreign(ctx context.Context, measure bool) (list []foreign.Container, err error) {
	s.looks = true
	err = s.withStore(ctx, func(node control.Node) (err error) {
		list, err = node.Foreign(ctx, measure)
		return err
	})
	return list, err
}

func (s standIn) RemoveForeign(ctx context.Context, ids []string) (removed control.ForeignRemoved, err error) {
	err = s.withStore(ctx, func(node control.Node) (err error) {
		removed, err = node.RemoveForeign(ctx, ids)
		return err
	})
	return removed, err
}

// withStore calls f with a node that has an image store and no engine.
func (s standIn) withStore(ctx context.Context, f func(control.Node) error) (err error) {
	store, err := storage.Open(ctx, s.image())
	if err != nil {
		return err
	}
	defer closing(&err, func() error { return store.Close(ctx) })
	return f(control.Node{Store: store})
}

// removeParents removes the parent cgroups of containers and monitors that belong to crius
// and are empty. Another server may use them as well.
func removeParents(ctx context.Context, cfg config.Config) error {
	names := []string{cfg.Runtime.MonitorCgroup}
	if leaf := pullCgroupOf(cfg).Leaf(); leaf != "" {
		names = append(names, leaf, filepath.Dir(leaf))
	}
	if cfg.Runtime.CgroupDriver == "cgroupfs" && cfg.Pod.CgroupParent == "" {
		names = append(names, "/crius")
	}
	var errs []error
	for _, name := range names {
		if name == "" {
			continue
		}
		pids, err := cgroup.Procs(name)
		below, belowErr := cgroup.Below(name, func(string) bool { return true })
		if err = errors.Join(err, belowErr); err == nil && len(pids)+len(below) == 0 {
			err = cgroup.Remove(ctx, name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// hasState reports whether a server has run since the last boot or reinstallation.
func hasState(cfg config.Config) bool {
	for _, dir := range []string{cfg.Root, cfg.RunRoot} {
		if _, err := os.Lstat(dir); err == nil {
			return true
		}
	}
	return false
}

// neverLocked reports whether the lock does not exist, so that no server can be running.
// Commands that only look do not create it.
func neverLocked(cfg config.Config) bool {
	_, err := os.Lstat(filepath.Join(cfg.Root, "lock"))
	return errors.Is(err, os.ErrNotExist)
}

// asked calls f, but returns when ctx ends even if f does not.
func asked[T any](ctx context.Context, f func(context.Context) (T, error)) (T, error) {
	type outcome struct {
		result T
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		result, err := f(ctx)
		done <- outcome{result, err}
	}()
	select {
	case o := <-done:
		return o.result, o.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}
