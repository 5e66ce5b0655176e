package durable

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"go.podman.io/storage/pkg/lockfile"

	"github.com/crius-run/crius/internal/flock"
)

// tarSplit ends the name of a file with what tar-split notes of a layer's archive.
const tarSplit = ".tar-split.gz"

// sweepDescriptions deletes tar-split data that no layer has. A worker leaves them if it ends just
// before it adds a layer. Workers and the library move such a file and write the record while they
// have both locks. If somebody is adding a layer now, the next start looks again.
func (d *Leftovers) sweepDescriptions(ctx context.Context) error {
	roots := RootsOf(d.store)
	if found, err := roots.withoutLayer(); err != nil || len(found) == 0 {
		return err
	}
	if err := d.locks.Await(ctx, ToWrite); err != nil {
		return err
	}
	records := filepath.Dir(filepath.Join(roots.ForImages(), layersFile))
	turn, err := os.Open(records)
	if err != nil {
		return err
	}
	defer func() { _ = flock.Release(turn) }()
	if err := flock.Try(turn); errors.Is(err, flock.ErrBusy) {
		return nil
	} else if err != nil {
		return err
	}
	lock, err := lockfile.GetLockFile(filepath.Join(records, "layers.lock"))
	if err != nil {
		return err
	}
	lock.Lock()
	defer lock.Unlock()
	found, err := roots.withoutLayer()
	for _, file := range found {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}

// withoutLayer returns the files of tar-split data for whose layer there is no record. While
// records are moved aside nobody knows, so it returns none.
func (r Roots) withoutLayer() (files []string, err error) {
	if aside, err := r.DamagedRecords(); err != nil || len(aside) > 0 {
		return nil, err
	}
	all, err := r.RecordedLayers()
	if err != nil {
		return nil, err
	}
	recorded := map[string]bool{}
	for _, layer := range all {
		recorded[layer.ID] = true
	}
	for _, root := range r.All() {
		found, err := filepath.Glob(filepath.Join(root, filepath.Dir(layersFile), "*"+tarSplit))
		if err != nil {
			return nil, err
		}
		for _, file := range found {
			if !recorded[strings.TrimSuffix(filepath.Base(file), tarSplit)] {
				files = append(files, file)
			}
		}
	}
	return files, nil
}
