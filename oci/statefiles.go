package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crius-run/crius/conmon/shim"
	"github.com/crius-run/crius/internal/fault"
)

// StateFiles are the paths of a runtime's own files about each container that
// it has created or begun to create, keyed by the container's id.
type StateFiles map[string][]string

// stateFilesOf returns the paths that patterns name for a container: in the
// runtime's root, unless a pattern is absolute.
func (r *cli) stateFilesOf(id string, patterns []string) ([]string, error) {
	var all []string
	for _, pattern := range patterns {
		path := strings.Replace(pattern, "ID", id, 1) // an id needs no quoting
		if !filepath.IsAbs(path) {
			path = filepath.Join(r.handler.Root, path)
		}
		found := []string{path}
		var err error
		if strings.Contains(pattern, "*") {
			found, err = filepath.Glob(path)
		} else if _, err = os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// StateFiles reads the root of the runtime.
func (r *cli) StateFiles() (StateFiles, error) { return StateFilesIn(r.handler.Root) }

// StateFiles returns runc's state files behind its shim. Other shims keep
// theirs in places of their own.
func (r *shimmed) StateFiles() (StateFiles, error) {
	return StateFilesIn(filepath.Join(r.handler.Root, shim.Namespace))
}

// allInRoot reports whether all state files of the runtime are in the root of the handler, so that
// they say what it knows. It makes its root when it is asked.
func (r *cli) allInRoot(a *Abilities) bool {
	ownRoot := slices.ContainsFunc(r.handler.Options, func(option string) bool {
		name, _, _ := strings.Cut(option, "=")
		return strings.TrimLeft(name, "-") == "root"
	})
	return a.quirks.inRoot && !ownRoot
}

// List asks a runtime whose state is not known to be in its root.
func (r *cli) List(ctx context.Context) ([]string, error) {
	a, err := r.Probe(ctx)
	if err != nil {
		return nil, err
	}
	if r.allInRoot(a) {
		return nil, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lastTime, fmt.Errorf("%s did not answer within %s: %w", r.name, lastTime, fault.Timeout))
	defer cancel()
	text, err := command{argv: r.argv(a, "list", "--quiet")}.run(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s list: %w", r.name, err)
	}
	return strings.Fields(string(text)), nil
}

// List returns what gVisor's shim has state files about. Other shims know only
// their own containers.
func (r *shimmed) List(context.Context) ([]string, error) {
	if !shim.OfRunsc(r.handler.Path) {
		return nil, nil
	}
	files, err := StateFilesIn(runscShimRoot)
	return slices.Collect(maps.Keys(files)), err
}

// runscShimRoot is where gVisor's shim keeps its state unless its configuration
// names another root. Other programs use it as well.
const runscShimRoot = "/run/containerd/runsc/" + shim.Namespace

// StateFilesIn reads a directory of runtimes' files.
func StateFilesIn(dir string) (StateFiles, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	stateFiles := StateFiles{}
	for _, entry := range entries {
		id := subject(entry.Name())
		stateFiles[id] = append(stateFiles[id], filepath.Join(dir, entry.Name()))
	}
	return stateFiles, err
}

// subject returns the id of the container to which a runtime's file or
// directory of this name belongs, for any runtime: no id looks like the names
// of runsc's files.
func subject(name string) string {
	if id, ok := strings.CutPrefix(name, "runsc-"); ok {
		return strings.TrimSuffix(id, ".sock")
	}
	id, _, _ := strings.Cut(name, "_sandbox:")
	return id
}
