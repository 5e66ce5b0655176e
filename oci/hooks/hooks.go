// Package hooks gives containers the OCI hooks that are installed on the node
// (oci-hooks(5), schema 1.0.0): JSON files in directories, each with a program,
// the stages in which it runs, and the conditions under which a container gets
// it.
//
// Hooks run as root on the node, so a file is trusted only if only root can
// change it. A file that cannot be trusted or parsed is an error, never
// skipped: a hook that restricts containers must not go missing unnoticed
// (docs/decisions/0028-hooks.md).
package hooks

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

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

const (
	maxFile    = 64 << 10 // bytes of a hook file; most have less than one kilobyte
	maxEntries = 1024     // names in a hook directory
	maxHooks   = 256      // hooks in all directories
)

// Set is the hooks of a node, in the order in which they run.
type Set []*hook

// Container holds the properties with which conditions are compared, in
// addition to the container's command.
type Container struct {
	// Annotations are those of the pod and the container. Those of the spec
	// override them.
	Annotations map[string]string
	BindMounts  bool // the request mounts something from the node
}

// Read reads the hook files (*.json) in dirs. A file in a later directory
// replaces one of the same name in an earlier directory, which is not read
// then. A missing directory counts as empty. Errors are fault.Precondition.
func Read(dirs []string) (Set, error) {
	set, errs := read(dirs)
	return set, errors.Join(errs...)
}

func read(dirs []string) (set Set, errs []error) {
	paths := map[string]string{} // by file name
	for _, dir := range dirs {
		names, err := regular.Names(dir, maxEntries)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, broken("hook directory", err))
		}
		for _, name := range names {
			if filepath.Ext(name) == ".json" {
				paths[name] = filepath.Join(dir, name)
			}
		}
	}
	if len(paths) > maxHooks {
		return nil, append(errs, fmt.Errorf("%d hook files in %s, at most %d are allowed: %w", len(paths), strings.Join(dirs, ", "), maxHooks, fault.Precondition))
	}
	for _, name := range slices.SortedFunc(maps.Keys(paths), inOrder) {
		h, err := readFile(paths[name])
		switch {
		case err != nil:
			errs = append(errs, broken("hook file", err))
		case h != nil:
			set = append(set, h)
		}
	}
	return set, errs
}

func broken(what string, err error) error {
	if errors.Is(err, fault.Precondition) {
		return fmt.Errorf("%s %w", what, err)
	}
	return fmt.Errorf("%s %w: %w", what, err, fault.Precondition)
}

// inOrder compares file names without regard to case, as oci-hooks(5) says, and
// orders names that differ only in case.
func inOrder(a, b string) int {
	if c := strings.Compare(strings.ToLower(a), strings.ToLower(b)); c != 0 {
		return c
	}
	return strings.Compare(a, b)
}

// readFile returns nil for a file that was removed after its directory was read.
func readFile(path string) (*hook, error) {
	text, err := regular.ReadTrusted(path, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, fmt.Errorf("%s is a dangling link", path)
	}
	if err != nil {
		return nil, err
	}
	h, err := parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	h.file = path
	return h, nil
}

// Check returns everything that is wrong with the hooks in dirs, and the number
// of usable ones. Unlike Read it also checks the programs of hooks that no
// container may match.
func Check(dirs []string) (usable int, errs []error) {
	set, errs := read(dirs)
	for _, h := range set {
		if err := h.checkProgram(); err != nil {
			errs = append(errs, err)
			continue
		}
		usable++
	}
	return usable, errs
}

// Inject adds the hooks that match the container to its spec, and then lets
// those of the stage precreate change the spec, one after the other. After an
// error the spec must not be used.
func (set Set) Inject(ctx context.Context, s *specs.Spec, c Container) error {
	annotations := maps.Clone(c.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	maps.Copy(annotations, s.Annotations)
	var filters []*hook
	for _, h := range set {
		if !h.when.match(s, annotations, c.BindMounts) {
			continue
		}
		if err := h.checkProgram(); err != nil {
			return err
		}
		if h.addTo(s) {
			filters = append(filters, h)
		}
	}
	for _, h := range filters {
		if err := h.filter(ctx, s); err != nil {
			return fmt.Errorf("precreate hook of %s: %w", h.file, err)
		}
	}
	return nil
}
