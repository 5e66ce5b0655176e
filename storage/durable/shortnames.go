package durable

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"go.podman.io/storage/pkg/lockfile"
)

// sweepShortNames deletes short names that are no layer's: links in overlay/l, by which the library names
// layers to the kernel. It makes the link before it writes the name down in the directory of the layer,
// and deletes the one that it finds there with the layer: if it dies in between, or a power cut empties
// that file, the link stays for ever. The library holds its lock on the layers meanwhile.
func (d *Leftovers) sweepShortNames(ctx context.Context) error {
	roots := RootsOf(d.store)
	if found, err := roots.shortNamesOfNone(); err != nil || len(found) == 0 {
		return err
	}
	if err := d.locks.Await(ctx, ToWrite); err != nil {
		return err
	}
	for _, root := range roots.All() {
		lock, err := lockfile.GetLockFile(filepath.Join(root, "overlay-layers", "layers.lock"))
		if err != nil {
			return err
		}
		lock.Lock()
		defer lock.Unlock()
	}
	found, err := roots.shortNamesOfNone()
	for _, link := range found {
		err = errors.Join(err, os.Remove(link))
	}
	return err
}

// shortNamesOfNone returns the links whose names the directories to which they lead do not have.
func (r Roots) shortNamesOfNone() (found []string, err error) {
	for _, root := range r.All() {
		dir := filepath.Join(root, "overlay", "l")
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, entry := range entries {
			link := filepath.Join(dir, entry.Name())
			to, err := os.Readlink(link)
			if err != nil || filepath.Base(to) != "diff" {
				continue // it is none of the library's
			}
			name, err := os.ReadFile(filepath.Join(dir, filepath.Dir(to), "link"))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("short name of a layer: %w", err)
			}
			if string(name) != entry.Name() {
				found = append(found, link)
			}
		}
	}
	return found, nil
}
