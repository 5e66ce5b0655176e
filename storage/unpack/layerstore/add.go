package layerstore

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	cstorage "go.podman.io/storage"
	drivers "go.podman.io/storage/drivers"
	"go.podman.io/storage/pkg/idtools"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// Add implements layers.Store.
//
// The library adds staged layers, too (ApplyStagedLayer), but each by itself: for every layer it writes the records of all
// layers twice, and syncs the whole file system. Here all layers share that. The lock, the
// order of what is written and the driver that makes the directories are the library's, so that a process
// that is killed leaves what the library cleans up: layers whose records say that they are incomplete.
func (s Store) Add(all []layers.Unpacked) (added []layers.Place, err error) {
	var count int
	if slices.ContainsFunc(all, func(l layers.Unpacked) bool { return l.Dir != "" }) {
		if count, err = s.record(all); err != nil {
			_, _ = s.Layer(all[count].ID) // the library deletes incomplete layers when it looks
		}
	} else {
		count, err = s.count(all)
	}
	for _, l := range all[:count] {
		added = append(added, s.place(l))
	}
	return added, err
}

// count returns how many layers the store has, from the first one on, and why not the next one.
func (s Store) count(all []layers.Unpacked) (int, error) {
	for i, l := range all {
		if _, err := s.Layer(l.ID); err != nil {
			return i, fmt.Errorf("layer %s: %w", l.ID, err)
		}
	}
	return len(all), nil
}

// place says where a layer is that the store has.
func (s Store) place(l layers.Unpacked) layers.Place {
	if l.Dir == "" {
		if stored, err := Locate(s.Store, &cstorage.Layer{ID: l.ID}); err == nil {
			return stored.Place
		}
	}
	return layers.Place{Files: filepath.Join(s.dir(l.ID), diskusage.FilesName), Split: s.split(l.ID)}
}

// dir is where the driver has a layer.
func (s Store) dir(id string) string { return filepath.Join(root(s), s.GraphDriverName(), id) }

// split is where the library has the tar-split data of a layer.
func (s Store) split(id string) string {
	return filepath.Join(s.GraphRoot(), recordsDir, id+diskusage.SplitSuffix)
}

// record moves layers into the store, and writes their records. It returns how many the store has now, and
// why it has not the next one.
func (s Store) record(all []layers.Unpacked) (added int, err error) {
	driver, err := s.GraphDriver()
	if err != nil {
		return 0, err
	}
	records, err := lockRecords(s, all[0].Parent, s.elsewhere(all, driver))
	if err != nil {
		return 0, err
	}
	var moved []int
	defer func() {
		records.unlock()
		for _, i := range moved {
			layer := diskusage.Layer{Dir: s.dir(all[i].ID), Split: s.split(all[i].ID)}
			_, _ = layer.NoteWith(all[i].Usage) // if it fails, the server measures the layer
		}
	}()
	missing, end, gone := records.missing(all)
	if len(missing) == 0 {
		return end, gone
	}
	entries := make([]*cstorage.Layer, len(missing))
	for k, i := range missing {
		entries[k] = s.entry(all[i], records, driver)
		records.maps[all[i].ID] = [2][]idtools.IDMap{entries[k].UIDMap, entries[k].GIDMap}
	}
	if err := records.write(entries); err != nil {
		return missing[0], err
	}
	done := 0
	for k, i := range missing {
		if err = s.move(all[i], entries[k], driver); err != nil {
			break
		}
		entries[k].Flags = nil
		done++
	}
	if done > 0 {
		if err := s.sync(driver); err != nil {
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
// Most have none, and each look costs locks.
func (s Store) elsewhere(all []layers.Unpacked, driver drivers.Driver) (found []*cstorage.Layer) {
	if s.ImageStore() == "" && len(driver.AdditionalImageStores()) == 0 {
		return nil
	}
	ids := []string{all[0].Parent}
	for _, l := range all {
		ids = append(ids, l.ID)
	}
	for _, id := range ids {
		if layer, err := s.Layer(id); err == nil && layer.ReadOnly {
			found = append(found, layer)
		}
	}
	return found
}

// entry is the record of a layer that is incomplete, as the library would write it.
func (s Store) entry(l layers.Unpacked, records *records, driver drivers.Driver) *cstorage.Layer {
	maps := records.maps[l.Parent]
	if l.Parent == "" {
		maps = [2][]idtools.IDMap{s.UIDMap(), s.GIDMap()}
	}
	if driver.SupportsShifting(maps[0], maps[1]) {
		maps = [2][]idtools.IDMap{}
	}
	return &cstorage.Layer{
		ID: l.ID, Parent: l.Parent, Created: time.Now().UTC(),
		CompressedDigest: l.Record.Blob, CompressedSize: l.Record.Size,
		UncompressedDigest: l.Record.Content, UncompressedSize: l.Size,
		UIDs: l.UIDs, GIDs: l.GIDs, UIDMap: maps[0], GIDMap: maps[1],
		Flags: map[string]any{incomplete: true},
	}
}

// move makes the directories of a layer, and moves its files and its tar-split data there.
//
// Who has unpacked the layer may have been taken over by it. So what is moved is looked at where only the
// library and this process can change it.
func (s Store) move(l layers.Unpacked, entry *cstorage.Layer, driver drivers.Driver) error {
	differ, is := driver.(drivers.DriverWithDiffer)
	if !is {
		return cstorage.ErrNotSupported
	}
	err := driver.Create(l.ID, l.Parent, &drivers.CreateOpts{IDMappings: idtools.NewIDMappingsFromMaps(entry.UIDMap, entry.GIDMap)})
	if err != nil {
		return err
	}
	if err := s.moveSplit(l.Split, s.split(l.ID)); err != nil {
		return err
	}
	here := filepath.Join(s.dir(l.ID), "unpacked")
	if err := os.Rename(l.Dir, here); err != nil {
		return err
	}
	if err := isA(here, unix.S_IFDIR); err != nil {
		return err
	}
	mode := os.FileMode(0) // the library must not set it: it has been set
	out := &drivers.DriverWithDifferOutput{Target: here, Size: l.Size, RootDirMode: &mode, UIDs: l.UIDs, GIDs: l.GIDs}
	return differ.ApplyDiffFromStagingDirectory(l.ID, l.Parent, out, &drivers.ApplyDiffWithDifferOpts{})
}

// maxSplit is the maximum size of tar-split data that are copied, in bytes: meanwhile the store is locked. An image may have
// four million files, of which each takes some hundred bytes.
const maxSplit = 4 << 30

// moveSplit moves the tar-split data to where the library has those of a layer. Without a record
// the file means nothing. Given to the library, the data would be compressed while all layers are
// locked. The library syncs the file system of the records before it completes that of the layer.
func (s Store) moveSplit(from, to string) error {
	if s.ImageStore() == "" { // layers and their tar-split data are in one file system
		err := os.Rename(from, to)
		if err == nil {
			return isA(to, unix.S_IFREG)
		}
		if !errors.Is(err, unix.EXDEV) {
			return err
		}
	}
	file, err := regular.Open(from)
	if err != nil {
		return err
	}
	defer file.Close()
	st, err := file.Stat()
	if err == nil && st.Size() > maxSplit {
		err = fmt.Errorf("%s has %d bytes, more than the tar-split data of any layer: %w", from, st.Size(), fault.Invalid)
	}
	if err != nil {
		return err
	}
	copied, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.CopyN(copied, file, st.Size()) // a worker may go on writing
	if err == nil {
		err = copied.Sync()
	}
	return errors.Join(err, copied.Close(), os.Remove(from))
}

// isA refuses a file that is not of a kind, which is a part of its mode.
func isA(path string, kind uint32) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != kind || kind == unix.S_IFREG && st.Nlink != 1 {
		return fmt.Errorf("what was unpacked for %s is not what it should be (mode %o, %d links): %w", path, st.Mode, st.Nlink, fault.Invalid)
	}
	return nil
}

// sync has the file system write what was moved, before the records say that it is complete.
func (s Store) sync(driver drivers.Driver) error {
	if driver.SyncMode() == drivers.SyncModeNone {
		return nil
	}
	dir, err := os.Open(filepath.Join(root(s), recordsDir))
	if err != nil {
		return err
	}
	defer dir.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(dir.Fd())))
}
