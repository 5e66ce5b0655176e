package layers

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"time"

	cstorage "go.podman.io/storage"
	drivers "go.podman.io/storage/drivers"
	"go.podman.io/storage/pkg/idtools"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/diskusage"
)

// Add implements Target.
//
// The library adds staged layers, too (ApplyStagedLayer), but each by itself: for every layer it writes the records of all
// layers twice, and syncs the whole file system. Here all layers share that. The lock, the
// order of what is written and the driver that makes the directories are the library's, so that a process
// that is killed leaves what the library cleans up: layers whose records say that they are incomplete.
func (u *Unpacker) Add(ctx context.Context, layers []Addition) (added int, err error) {
	ready, failed := u.inherit(ctx, layers)
	if !slices.ContainsFunc(layers[:ready], isStaged) {
		return ready, failed
	}
	added, err = u.record(layers[:ready])
	if err != nil {
		_, _ = u.store.Layer(layers[added].ID) // the library deletes incomplete layers when it looks
	}
	return added, cmp.Or(err, failed)
}

func isStaged(l Addition) bool { return l.Staged != nil }

// inherit gives the directories that no entry describes the attributes that they have in the layers below. It returns how
// many layers are ready to be added, and the error of the next one.
func (u *Unpacker) inherit(ctx context.Context, layers []Addition) (ready int, err error) {
	below := u.below
	below.dirs = slices.Clone(below.dirs) // to which those are added that will move
	for i, l := range layers {
		s, is := l.Staged.(*staged)
		if !is {
			continue
		}
		if err := s.inherit(ctx, l.Parent, &below); err != nil {
			return i, err
		}
		below.grow(l.Parent, l.ID, s.out.Target)
	}
	return len(layers), nil
}

// record moves layers into the store, and writes their records. It returns how many the store has now, and
// why it has not the next one.
func (u *Unpacker) record(layers []Addition) (added int, err error) {
	driver, err := u.store.GraphDriver()
	if err != nil {
		return 0, err
	}
	records, err := lockRecords(u.store, layers[0].Parent, u.elsewhere(layers))
	if err != nil {
		return 0, err
	}
	var moved []int
	defer func() {
		records.unlock()
		for _, i := range moved {
			u.finish(layers[i])
		}
	}()
	missing, end, gone := records.missing(layers)
	if len(missing) == 0 {
		return end, gone
	}
	entries := make([]*cstorage.Layer, len(missing))
	for k, i := range missing {
		entries[k] = u.entry(layers[i], records, driver)
		records.maps[layers[i].ID] = [2][]idtools.IDMap{entries[k].UIDMap, entries[k].GIDMap}
	}
	if err := records.write(entries); err != nil {
		return missing[0], err
	}
	done := 0
	for k, i := range missing {
		if err = u.move(layers[i], entries[k], driver); err != nil {
			break
		}
		entries[k].Flags = nil
		done++
	}
	if done > 0 {
		if err := u.sync(driver); err != nil {
			return missing[0], err
		}
		if err := records.write(entries); err != nil {
			return missing[0], err
		}
		moved = missing[:done]
	}
	if err != nil {
		return missing[done], err
	}
	return end, gone
}

// elsewhere returns those of the layers, and of the one below them, that are in other stores, which this one only reads.
func (u *Unpacker) elsewhere(layers []Addition) (found []*cstorage.Layer) {
	ids := []string{layers[0].Parent}
	for _, l := range layers {
		ids = append(ids, l.ID)
	}
	for _, id := range ids {
		if layer, err := u.store.Layer(id); err == nil && layer.ReadOnly {
			found = append(found, layer)
		}
	}
	return found
}

// entry is the record of a layer that is incomplete, as the library would write it.
func (u *Unpacker) entry(l Addition, records *records, driver drivers.Driver) *cstorage.Layer {
	s := l.Staged.(*staged) //nolint:forcetypeassert // it comes from Stage
	maps := records.maps[l.Parent]
	if l.Parent == "" {
		maps = [2][]idtools.IDMap{u.store.UIDMap(), u.store.GIDMap()}
	}
	if driver.SupportsShifting(maps[0], maps[1]) {
		maps = [2][]idtools.IDMap{}
	}
	return &cstorage.Layer{
		ID: l.ID, Parent: l.Parent, Created: time.Now().UTC(),
		CompressedDigest: l.Record.Blob, CompressedSize: l.Record.Size,
		UncompressedDigest: l.Record.Content, UncompressedSize: s.out.Size,
		UIDs: s.out.UIDs, GIDs: s.out.GIDs, UIDMap: maps[0], GIDMap: maps[1],
		Flags: map[string]any{incomplete: true},
	}
}

// move makes the directories of a layer, and moves its files and its tar-split data there.
func (u *Unpacker) move(l Addition, entry *cstorage.Layer, driver drivers.Driver) error {
	s := l.Staged.(*staged) //nolint:forcetypeassert // it comes from Stage
	differ, is := driver.(drivers.DriverWithDiffer)
	if !is {
		return cstorage.ErrNotSupported
	}
	err := driver.Create(l.ID, l.Parent, &drivers.CreateOpts{IDMappings: idtools.NewIDMappingsFromMaps(entry.UIDMap, entry.GIDMap)})
	if err != nil {
		return err
	}
	if err := s.moveSplit(u.split(l.ID)); err != nil {
		return err
	}
	return differ.ApplyDiffFromStagingDirectory(l.ID, l.Parent, &s.out, &drivers.ApplyDiffWithDifferOpts{})
}

// split is where the library has the tar-split data of a layer.
func (u *Unpacker) split(id string) string {
	return filepath.Join(u.store.GraphRoot(), recordsDir, id+diskusage.SplitSuffix)
}

// sync has the file system write what was moved, before the records say that it is complete.
func (u *Unpacker) sync(driver drivers.Driver) error {
	if driver.SyncMode() == drivers.SyncModeNone {
		return nil
	}
	dir, err := os.Open(filepath.Join(root(u.store), recordsDir))
	if err != nil {
		return err
	}
	defer dir.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(dir.Fd())))
}

// finish notes that a layer was added.
func (u *Unpacker) finish(l Addition) {
	s := l.Staged.(*staged) //nolint:forcetypeassert // it comes from Stage
	layer := diskusage.Layer{Dir: filepath.Join(root(u.store), "overlay", l.ID), Split: u.split(l.ID)}
	_, _ = layer.NoteWith(s.files) // if it fails, the server measures the layer
	u.below.grow(l.Parent, l.ID, filepath.Join(layer.Dir, "diff"))
	s.added, s.result.Implied = true, nil
	u.added(l.Record.Content, s.result.Size+s.counted.mine.holes) // the library does not count holes
	_ = s.dir.delete()                                            // empty; if it stays, the next start deletes it
}
