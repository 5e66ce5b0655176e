// Package pullcgroup runs the processes that unpack images in a cgroup of their
// own (image.pull_cgroup), so that an operator can limit them or charge pods
// for them. See docs/decisions/0048-pull-cgroup.md.
//
// With the cgroupfs driver that is the cgroup crius-pulls below the configured
// one, made with the first process in it and removed with the last. With the
// systemd driver each process has a scope in the slice, which ends with it.
package pullcgroup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/spec"
)

// Pod as the parent means the cgroup of the pod for which an image is pulled.
const Pod = "pod"

// Config says below which cgroup the processes run.
type Config struct {
	Driver string // spec.Cgroupfs or spec.Systemd
	Parent string // a path or, with systemd, a slice; Pod; empty: processes stay in crius's own
}

// Check refuses a parent that does not fit the driver.
func (c Config) Check() error {
	slice := strings.HasSuffix(c.Parent, ".slice")
	switch {
	case c.Parent == "" || c.Parent == Pod:
		return nil
	case c.Driver == spec.Systemd && !slice:
		return fmt.Errorf("must be a slice such as pulls.slice, %s or an empty string, since runtime.cgroup_driver is %s, got %q: %w", Pod, c.Driver, c.Parent, fault.Invalid)
	case c.Driver == spec.Cgroupfs && (slice || !strings.HasPrefix(c.Parent, "/")):
		return fmt.Errorf("must be an absolute path below the cgroup mount such as /pulls, %s or an empty string, since runtime.cgroup_driver is %s, got %q: %w", Pod, c.Driver, c.Parent, fault.Invalid)
	}
	_, _, err := c.path(c.Parent, "0")
	return err
}

// Leaf returns the cgroup of the processes in the configured one; empty: they
// have none of their own, are in cgroups of pods, or in scopes.
func (c Config) Leaf() string {
	if c.Driver != spec.Cgroupfs || c.Parent == Pod || c.Parent == "" {
		return ""
	}
	_, leaf, _ := c.path(c.Parent, "pulls")
	return leaf
}

// path returns a cgroup below a parent, as systemd's slice:prefix:name and as a
// path in the file system.
func (c Config) path(parent, name string) (unit, path string, err error) {
	unit, err = spec.CgroupsPath(c.Driver, spec.CgroupPrefix, parent, name)
	if err == nil {
		path, err = spec.CgroupfsPath(c.Driver, unit)
	}
	return unit, path, err
}

// Ready returns what the node lacks for these cgroups; without it no image can
// be pulled. The error is fault.Precondition.
func (c Config) Ready() error {
	if c.Driver != spec.Systemd || c.Parent == "" {
		return nil
	}
	_, err := findBus()
	return err
}

// Groups are the cgroups of processes that unpack images. Its methods are safe for concurrent
// use.
type Groups struct {
	cfg   Config
	start func(context.Context, scopeUnit) error // nil: cgroups are made in the file system

	mu    sync.Mutex
	users map[string]int // number of processes by cgroup
}

// New returns the cgroups of a configuration that Check has accepted.
func New(cfg Config) *Groups {
	g := &Groups{cfg: cfg, users: map[string]int{}}
	if cfg.Driver == spec.Systemd {
		g.start = startScope
	}
	return g
}

// Enter moves a process that has just been started to the cgroup in which it
// will unpack an image for a pod with this cgroup parent; empty: for no pod.
// leave must be called when the process has ended.
func (g *Groups) Enter(ctx context.Context, pod string, pid int) (leave func(), err error) {
	parent := g.cfg.Parent
	if parent == Pod {
		parent = pod
	}
	if parent == "" {
		return func() {}, nil
	}
	if g.start != nil {
		return g.enterScope(ctx, parent, pid)
	}
	_, path, err := g.cfg.path(parent, "pulls")
	if err != nil {
		return nil, err
	}
	if g.cfg.Parent != Pod { // the kubelet makes cgroups of pods
		if err := cgroup.Make(filepath.Dir(path)); err != nil {
			return nil, err
		}
	}
	g.mu.Lock() // must not run during a removal
	g.users[path]++
	g.mu.Unlock()
	leave = func() { g.leave(context.WithoutCancel(ctx), path) }
	if err := cgroup.Move(path, pid); err != nil {
		leave()
		return nil, err
	}
	return leave, nil
}

// leave ends the use of a cgroup by a process.
func (g *Groups) leave(ctx context.Context, path string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.users[path]--; g.users[path] > 0 {
		return
	}
	delete(g.users, path)
	if err := cgroup.Remove(ctx, path); err != nil {
		slog.WarnContext(ctx, "cannot remove cgroup of a pull; the next pull or start retries", "err", err)
	}
}

// Recover removes what a killed server has left, including cgroups below those
// of pods. It must be called at the start, before the first Enter.
func (g *Groups) Recover(ctx context.Context, pods []string) {
	if g.cfg.Driver != spec.Cgroupfs || g.cfg.Parent == "" {
		return // systemd removes scopes
	}
	parents := []string{g.cfg.Parent}
	if g.cfg.Parent == Pod {
		parents = pods
	}
	var places []string
	for _, parent := range parents {
		if _, path, err := g.cfg.path(parent, "pulls"); err == nil { // otherwise no pull could have had it
			places = append(places, path)
		}
	}
	left, err := cgroup.Existing(places)
	for _, path := range left {
		err = errors.Join(err, cgroup.Remove(ctx, path))
	}
	if err != nil {
		slog.WarnContext(ctx, "cannot remove cgroups of earlier pulls; the next start retries", "err", err)
	}
}
