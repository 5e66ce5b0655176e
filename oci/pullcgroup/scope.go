package pullcgroup

import (
	"context"
	"crypto/rand"
	"fmt"
	"os/exec"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/trace"
)

// scopeUnit is a transient unit of systemd for a process that is running.
type scopeUnit struct {
	name, slice string
	path        string // below the cgroup mount
	pid         int
}

// enterScope has systemd move a process. systemd removes the scope with the
// last process in it, so leave has nothing to do.
func (g *Groups) enterScope(ctx context.Context, parent string, pid int) (leave func(), err error) {
	unit, place, err := g.cfg.path(parent, "pull-"+strings.ToLower(rand.Text()))
	if err != nil {
		return nil, err
	}
	if g.cfg.Parent == Pod { // systemd would make a slice for a pod that is gone, and keep it
		if there, err := cgroup.Exists(path.Dir(place)); !there || err != nil {
			return func() {}, err
		}
	}
	slice, _, _ := strings.Cut(unit, ":")
	if err := g.start(ctx, scopeUnit{name: path.Base(place), slice: slice, path: place, pid: pid}); err != nil {
		return nil, fmt.Errorf("start scope in %s for a pull: %w", slice, err)
	}
	return func() {}, nil
}

// bus calls systemd through busctl, which comes with it.
type bus struct{ program string }

func findBus() (bus, error) {
	program, err := exec.LookPath("busctl")
	if err != nil {
		return bus{}, fmt.Errorf("busctl, which comes with systemd, is needed to start scopes: %w: %w", err, fault.Precondition)
	}
	return bus{program}, nil
}

// startScope finds busctl at each call: it may be installed while the server runs.
func startScope(ctx context.Context, s scopeUnit) error {
	bus, err := findBus()
	if err != nil {
		return err
	}
	return bus.start(ctx, s)
}

// scopeTime is far longer than systemd takes to start a scope.
const scopeTime = 20 * time.Second

// start returns once the process is in the scope.
func (b bus) start(ctx context.Context, s scopeUnit) error {
	ctx, cancel := context.WithTimeoutCause(ctx, scopeTime, fmt.Errorf("systemd does not answer: %w", fault.Timeout))
	defer cancel()
	defer trace.For(ctx, "systemd")()
	cmd := exec.CommandContext(ctx, b.program, s.call()...)
	cmd.WaitDelay = time.Second
	if said, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("busctl: %w: %.300s", err, strings.TrimSpace(string(said)))
	}
	within, err := cgroup.Membership(s.path)
	if err == nil && !poll.Until(ctx, time.Millisecond, func() bool { return within(s.pid) }) {
		err = context.Cause(ctx)
	}
	return err
}

// call returns the arguments of busctl that have systemd make the scope, which
// it removes even if a process in it has failed. The controllers are for v1,
// where systemd makes a cgroup only in the hierarchies of controllers that are
// accounted for.
func (s scopeUnit) call() []string {
	properties := []string{
		"Description", "s", "unpacking of an image by crius",
		"Slice", "s", s.slice,
		"PIDs", "au", "1", strconv.Itoa(s.pid),
		"CollectMode", "s", "inactive-or-failed",
		"CPUAccounting", "b", "true",
		"MemoryAccounting", "b", "true",
		"TasksAccounting", "b", "true",
		"IOAccounting", "b", "true",
	}
	const count = "8"
	call := []string{
		"--system", "--quiet", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
		"StartTransientUnit", "ssa(sv)a(sa(sv))", s.name, "fail", count,
	}
	return append(append(call, properties...), "0")
}
