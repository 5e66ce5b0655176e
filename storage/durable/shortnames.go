package durable

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.podman.io/storage/pkg/lockfile"
)

// SettleShortNames makes the short names of layers agree with the layers. A short name is a link in overlay/l, by which
// older versions of the library find the layers below another, and layers that those have made are found to this day.
//
// The library makes the link before it writes the name down in the directory of the layer, and deletes the one that it
// finds there with the layer: all of overlay/l if it finds an empty file, as a process that dies in between or a power
// cut leaves it. In an imagestore it deletes none. So names without a layer are deleted, and what a layer lacks is made
// again from what it has: the link or the file.
func SettleShortNames(ctx context.Context, roots Roots, locks *Locks) error {
	if changes, err := roots.shortNameChanges(); err != nil || len(changes) == 0 {
		return err
	}
	if err := locks.Await(ctx, ToWrite); err != nil {
		return err
	}
	for _, root := range roots.All() {
		lock, err := lockfile.GetLockFile(filepath.Join(root, "overlay-layers", "layers.lock"))
		if err != nil {
			return err
		}
		lock.Lock() // the library makes and deletes layers under it
		defer lock.Unlock()
	}
	changes, err := roots.shortNameChanges()
	for _, change := range changes {
		err = errors.Join(err, change())
	}
	if err != nil {
		return fmt.Errorf("short names of layers: %w", err)
	}
	return nil
}

// shortNameChanges returns what is to be done for SettleShortNames.
func (r Roots) shortNameChanges() (changes []func() error, err error) {
	for _, root := range r.All() {
		more, err := r.shortNameChangesIn(filepath.Join(root, "overlay"))
		if err != nil {
			return nil, err
		}
		changes = append(changes, more...)
	}
	return changes, nil
}

// linkDir is the directory of the links.
const linkDir = "l"

// shortName matches what the library writes down.
var shortName = regexp.MustCompile(`^\w+$`)

// shortNameChangesIn returns what is to be done for SettleShortNames in a directory with layers.
func (r Roots) shortNameChangesIn(overlay string) (changes []func() error, err error) {
	names, err := shortNames(overlay)
	if err != nil {
		return nil, err
	}
	layers, err := os.ReadDir(overlay)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	remove := func(path string) { changes = append(changes, func() error { return os.Remove(path) }) }
	for _, layer := range layers {
		id := layer.Name()
		file := filepath.Join(overlay, id, "link")
		text, err := os.ReadFile(file)
		missing := errors.Is(err, fs.ErrNotExist)
		links, name := names[id], string(text)
		switch {
		case !layer.IsDir(), id == linkDir, missing && len(links) == 0:
			continue
		case err != nil && !missing: // whoever needs the layer says what is wrong with it
			delete(names, id)
			continue
		case shortName.MatchString(name) && !slices.Contains(links, name):
			changes = append(changes, func() error { return makeShortName(overlay, id, name) })
		case shortName.MatchString(name):
		case len(links) > 0:
			name = r.shortNameBelow(links)
			changes = append(changes, func() error { return os.WriteFile(file, []byte(name), 0o644) })
		default:
			remove(file)
		}
		names[id] = slices.DeleteFunc(links, func(link string) bool { return link == name })
	}
	for _, id := range slices.Sorted(maps.Keys(names)) {
		for _, link := range names[id] {
			remove(filepath.Join(overlay, linkDir, link))
		}
	}
	return changes, nil
}

// shortNames returns the links that lead to layers, or to where one was, by layer.
func shortNames(overlay string) (map[string][]string, error) {
	dir := filepath.Join(overlay, linkDir)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	names := map[string][]string{}
	for _, entry := range entries {
		to, err := os.Readlink(filepath.Join(dir, entry.Name()))
		up, in, _ := strings.Cut(to, "/")
		id, diff, _ := strings.Cut(in, "/")
		if err == nil && up == ".." && diff == "diff" { // else it is none of the library's
			names[id] = append(names[id], entry.Name())
		}
	}
	return names, nil
}

// shortNameBelow returns the one of links by which another layer finds the layer to which all of them lead. If there is
// none, any will do.
func (r Roots) shortNameBelow(links []string) string {
	for _, root := range r.All() {
		files, _ := filepath.Glob(filepath.Join(root, "overlay", "*", "lower")) // the pattern is valid
		for _, file := range files {
			lower, _ := os.ReadFile(file) // an unreadable one is of no use to the library either
			for name := range strings.SplitSeq(string(lower), ":") {
				if name = filepath.Base(name); slices.Contains(links, name) {
					return name
				}
			}
		}
	}
	return links[0]
}

// makeShortName makes a link to a layer, unless something else has the name.
func makeShortName(overlay, id, name string) error {
	dir := filepath.Join(overlay, linkDir)
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.Symlink(filepath.Join("..", id, "diff"), filepath.Join(dir, name))
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}
