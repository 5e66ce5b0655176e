package audit

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/oci"
)

// This file finds what runtimes have left by asking them and the kernel: not every runtime keeps
// its files in its root. The places are shared with other programs, so that only ids with the mark
// of this server count.

// listed visits the containers that runtimes say they have. A runtime that cannot be asked does
// not keep the others from being asked.
func (v *visit) listed(ctx context.Context) {
	for name, runtime := range v.Runtimes.All() {
		all, err := runtime.List(ctx)
		if err != nil && !errors.Is(err, fault.Unavailable) {
			slog.WarnContext(ctx, "runtime does not list its containers, orphans may be missed", "handler", name, "err", err)
		}
		for _, id := range all {
			if v.isOurs(id) {
				v.add(id, "container of runtime handler %s", name)
			}
		}
	}
}

// helpers visits the virtual machines, proxies and shims of runtimes.
func (v *visit) helpers() error {
	var programs []string
	for _, runtime := range v.Runtimes.All() {
		programs = append(programs, filepath.Base(runtime.Handler().Path))
	}
	var err error
	if v.running, err = oci.Helpers(programs...); err != nil {
		return err
	}
	var used map[conmon.Process]bool
	for id, helpers := range v.running {
		if !v.isOurs(id) || v.knows(id) {
			continue
		}
		if used == nil {
			if used, err = v.shims(); err != nil {
				return err
			}
		}
		for _, h := range helpers {
			if used[h.Process] {
				continue
			}
			o := v.add(id, "%s, process %d,", h.Program, h.PID)
			o.helpers = append(o.helpers, h.Process)
		}
	}
	return nil
}

// shortened adds to orphans the helpers that name only the first digits of their ids, which do
// not say whose they are: only together with something that has the whole id do they count.
func (v *visit) shortened() {
	for id, o := range v.found {
		if !v.isOurs(id) {
			continue
		}
		for _, h := range v.running.Short(id) {
			v.add(id, "%s, process %d,", h.Program, h.PID)
			o.helpers = append(o.helpers, h.Process)
		}
	}
}

func (v *visit) isOurs(id string) bool { return ids.Valid(id) && ids.HasMark(id, v.Mark) }

// shims returns the shims of all containers on record, even if this server cannot manage their pods. A
// shim has the name of its first container, which may have been removed before the others.
func (v *visit) shims() (map[conmon.Process]bool, error) {
	used := map[conmon.Process]bool{}
	for _, p := range v.Node.Pods() {
		used[oci.ShimOf(p.Infra)] = true
	}
	dir := filepath.Join(v.RunDir, "containers")
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, entry := range entries {
		if v.knows(entry.Name()) {
			used[oci.ShimOf(oci.Ref{Dir: filepath.Join(dir, entry.Name())})] = true
		}
	}
	return used, nil
}

// Left returns what is left of pods and containers without a record, by id, as functions that remove
// it: directories, whose names it is given, what runtimes have, pinned namespaces and leases of this
// server, and the cgroups of these. With an error some of it may be missing.
func (a *Auditor) Left(ctx context.Context, directories []string) (map[string]func(context.Context) error, error) {
	v := &visit{Auditor: a, found: map[string]*orphan{}}
	v.listed(ctx)
	err := errors.Join(v.helpers(), v.files())
	for _, id := range directories {
		v.add(id, "directory %s", id)
	}
	found := maps.Clone(v.found)
	err = errors.Join(err, v.pins(), v.leases())
	maps.DeleteFunc(v.found, func(id string, _ *orphan) bool { return a.knows(id) || found[id] == nil && !v.isOurs(id) })
	if len(v.found) > 0 {
		found = maps.Clone(v.found)
		err = errors.Join(err, v.cgroups())
		maps.DeleteFunc(v.found, func(id string, _ *orphan) bool { return found[id] == nil })
	}
	v.shortened()
	left := map[string]func(context.Context) error{}
	for id, o := range v.found {
		left[id] = func(ctx context.Context) error { return a.remove(ctx, o) }
	}
	return left, err
}
