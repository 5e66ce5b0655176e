package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/cmd/crius/config"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/pod"
	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/storage/checkpoint/remote"
)

// root is a state directory.
type root struct {
	path    string
	names   []string // of crius's own entries
	allowed []string // of entries that the configuration puts there, which stay
	last    string   // the name that is removed after all others
}

// unfinished is the prefix of files that a server was writing when it died.
const unfinished = ".crius-"

// has reports whether a name in the root belongs only to crius.
func (r root) has(name string) bool {
	return !slices.Contains(r.allowed, name) && (slices.Contains(r.names, name) || strings.HasPrefix(name, unfinished))
}

// roots are in the order of their removal. A server that finds no lock may start, so the
// lock is removed last.
type roots []root

func rootsOf(cfg config.Config) roots {
	all := roots{
		{path: cfg.RunRoot, names: []string{"pods", "containers", "runtime", "metrics.sock", "control.sock", stacksFile, facadeLink, "lock"}, last: "lock"},
		{path: cfg.Root, names: []string{"pods", "containers", "pod-cidr", "pause", "pause.partial", "tuning", pod.LevelFile, pod.LevelFile + ".new", checkpoint.KeyFile, checkpoint.PublicFile, remote.Transfers, "lock"}, last: "lock"},
	}
	for i := range all {
		r := &all[i]
		for _, socket := range []string{cfg.API.Listen, cfg.API.CrioSocket} {
			if name, below := nameBelow(r.path, socket); below {
				r.names = append(r.names, name, name+".lock")
			}
		}
		if filepath.Clean(cfg.Pod.NamespacesDir) == filepath.Clean(r.path) {
			r.names = append(r.names, ns.Dirs()...)
		}
		for _, place := range []string{cfg.Image.Root, cfg.Image.RunRoot, cfg.Image.ImageStore, cfg.Image.TemporaryDir, cfg.Pod.NamespacesDir, cfg.RunRoot, cfg.Root} {
			if name, below := nameBelow(r.path, place); below {
				r.allowed = append(r.allowed, name)
			}
		}
	}
	return all
}

// nameBelow returns the name in root that leads to path.
func nameBelow(root, path string) (string, bool) {
	rest, below := strings.CutPrefix(filepath.Clean(path), strings.TrimSuffix(filepath.Clean(root), "/")+"/")
	name, _, _ := strings.Cut(rest, "/")
	return name, below && name != ""
}

// ours refuses roots that contain anything else: such a directory was configured by
// mistake.
func (r roots) ours() error {
	var errs []error
	for _, root := range r {
		entries, err := os.ReadDir(root.path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
		var unknown []string
		for _, entry := range entries {
			if !root.has(entry.Name()) && !slices.Contains(root.allowed, entry.Name()) {
				unknown = append(unknown, entry.Name())
			}
		}
		if len(unknown) > 0 {
			errs = append(errs, fmt.Errorf("%s not removed, it contains files that do not belong to crius: %.200s; correct root or run_root, or move them away",
				root.path, strings.Join(unknown, ", ")))
		}
	}
	return errors.Join(errs...)
}

// unmounted refuses roots that contain mounts: their removal would first delete everything
// in the mounted file system, such as a volume.
func (r roots) unmounted() error {
	var errs []error
	for _, root := range r {
		real, err := filepath.EvalSymlinks(root.path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		points, err := mount.Under(real)
		errs = append(errs, err)
		points = slices.DeleteFunc(points, func(point string) bool {
			name, below := nameBelow(real, point)
			return !below || slices.Contains(root.allowed, name)
		})
		if len(points) > 0 {
			errs = append(errs, fmt.Errorf("%s not removed, file systems are mounted below it: %s; unmount them, then run crius wipe again",
				root.path, strings.Join(points, ", ")))
		}
	}
	return errors.Join(errs...)
}

// remove removes crius's entries, and then the roots if they are empty.
func (r roots) remove() error {
	if err := r.unmounted(); err != nil {
		return err
	}
	var errs []error
	for _, root := range r {
		errs = append(errs, root.remove())
	}
	return errors.Join(errs...)
}

// remove removes crius's entries. It follows no link out of the root.
func (r root) remove() error {
	confined, err := os.OpenRoot(r.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(r.path)
	errs := []error{err}
	for _, name := range r.order(entries) {
		errs = append(errs, confined.RemoveAll(name))
	}
	errs = append(errs, confined.Close())
	if err := os.Remove(r.path); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EBUSY) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// order returns the names to remove, in that order.
func (r root) order(entries []os.DirEntry) []string {
	var first, last []string
	for _, entry := range entries {
		switch name := entry.Name(); {
		case !r.has(name):
		case name == r.last:
			last = append(last, name)
		default:
			first = append(first, name)
		}
	}
	return append(first, last...)
}
