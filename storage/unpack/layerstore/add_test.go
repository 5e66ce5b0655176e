package layerstore

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// newStore opens a store of the library in a directory, over one that it only reads, if there is one.
func newStore(t *testing.T, dir, readOnly string) cstorage.Store {
	t.Helper()
	options := cstorage.StoreOptions{RunRoot: filepath.Join(dir, "run"), GraphRoot: filepath.Join(dir, "root"), GraphDriverName: "overlay"}
	if readOnly != "" {
		options.GraphDriverOptions = []string{"overlay.imagestore=" + readOnly}
	}
	store, err := cstorage.GetStore(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(filepath.Join(options.GraphRoot, "overlay"), unix.MNT_DETACH) }) // the library mounts it upon itself
	return store
}

// unpacker unpacks layers for a store of the library.
type unpacker struct {
	*layers.Unpacker
	staging *Staging
}

func newUnpacker(t *testing.T, store cstorage.Store) unpacker {
	t.Helper()
	staging, err := NewStaging(store, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := staging.Delete(); err != nil {
			t.Error(err)
		}
	})
	return unpacker{layers.NewUnpacker(Store{store}, staging.Staging, 0), staging}
}

// dir is the directory of the n-th layer that was unpacked, from 1.
func (u unpacker) dir(n int) string { return filepath.Join(u.staging.Dir, fmt.Sprint(n)) }

// add adds layers, and returns how many the store has.
func (u unpacker) add(t *testing.T, all []layers.Addition) (int, error) {
	t.Helper()
	added, err := u.Add(t.Context(), all)
	return len(added), err
}

// archive has a file, and directories that are described by entries, or are not.
func archive(t *testing.T, file string, described bool) []byte {
	t.Helper()
	headers := []tar.Header{{Name: file, Typeflag: tar.TypeReg, Mode: 0o644}}
	if described {
		headers = append([]tar.Header{{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}}, headers...)
	}
	var all bytes.Buffer
	w := tar.NewWriter(&all)
	for i := range headers {
		if err := w.WriteHeader(&headers[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return all.Bytes()
}

// stage unpacks count layers, each with a file of its own in the directory d, which has an entry or has none.
func (u unpacker) stage(t *testing.T, count int, described bool) (all []layers.Addition) {
	t.Helper()
	var image []layers.Layer
	for i := range count {
		image = append(image, layers.Layer{Blob: digest.FromString(fmt.Sprint("blob ", i)), Size: int64(100 + i), DiffID: digest.FromBytes(archive(t, fmt.Sprint("d/file", i), described))})
	}
	for i, l := range layers.NewMissing(image) {
		staged, err := u.Stage(t.Context(), bytes.NewReader(archive(t, fmt.Sprint("d/file", i), described)), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = staged.Drop() })
		all = append(all, layers.Addition{Staged: staged, ID: l.ID, Parent: l.Parent, Record: layers.Record{Blob: l.Blob, Size: l.Size, Content: l.DiffID}})
	}
	return all
}

// recorded reads the records of layers from the disk.
func recorded(t *testing.T, store cstorage.Store) (all []map[string]any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(store.GraphRoot(), "overlay-layers", "layers.json"))
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// Layers that are added together are what the library makes of them: it finds them by id and digests, with
// their parents, sizes and files, and so does one that opens the store afterwards. Layers that were there stay.
func TestAddTogether(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store := newStore(t, dir, "")
	before, err := store.CreateLayer("", "", []string{"somebody's"}, "", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	u := newUnpacker(t, store)
	all := u.stage(t, 4, true)
	for _, together := range [][]layers.Addition{all[:1], all[1:], all} { // the last time they are there
		if added, err := u.add(t, together); added != len(together) || err != nil {
			t.Fatalf("%d, %v", added, err)
		}
	}
	again := filepath.Join(t.TempDir(), "again") // by another name it is opened once more
	if err := os.Symlink(dir, again); err != nil {
		t.Fatal(err)
	}
	store = newStore(t, again, "")
	if l, err := store.Layer("somebody's"); err != nil || l.ID != before.ID {
		t.Errorf("%+v, %v", l, err)
	}
	for i, l := range all {
		got, err := store.Layer(l.ID)
		if err != nil {
			t.Fatal(err)
		}
		if got.Parent != l.Parent || got.CompressedDigest != l.Record.Blob || got.CompressedSize != l.Record.Size || got.UncompressedDigest != l.Record.Content || len(got.Flags) > 0 || got.Created.IsZero() {
			t.Errorf("%+v", got)
		}
		if found, err := store.LayersByUncompressedDigest(l.Record.Content); err != nil || len(found) != 1 {
			t.Errorf("by digest: %+v, %v", found, err)
		}
		diff := Recall(store, got)
		var back bytes.Buffer
		if _, err := back.ReadFrom(diff); err != nil || digest.FromBytes(back.Bytes()) != l.Record.Content {
			t.Errorf("layer %d comes back as %d bytes, %v", i, back.Len(), err)
		}
		if err := diff.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(filepath.Join(store.GraphRoot(), "overlay", l.ID, "diff", "d", fmt.Sprint("file", i))); err != nil {
			t.Error(err)
		}
	}
	if records := recorded(t, store); len(records) != 5 {
		t.Errorf("%d records", len(records))
	}
}

// If a layer cannot be added, those below it are, and nothing is left of it and of those above it, which can be
// added afterwards.
func TestAddUntilOneFails(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	u := newUnpacker(t, store)
	all := u.stage(t, 4, true)
	if err := os.RemoveAll(u.dir(3)); err != nil {
		t.Fatal(err)
	}
	added, err := u.add(t, all)
	if added != 2 || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%d, %v", added, err)
	}
	if records := recorded(t, store); len(records) != 2 || slices.ContainsFunc(records, func(r map[string]any) bool { return r["flags"] != nil }) {
		t.Errorf("records %v", records)
	}
	for i, l := range all {
		_, missing := os.Stat(filepath.Join(store.GraphRoot(), "overlay", l.ID))
		_, unsplit := os.Stat(Store{store}.split(l.ID))
		if has := missing == nil && unsplit == nil; has != (i < 2) || (missing == nil) != (unsplit == nil) {
			t.Errorf("layer %d: %v, %v", i, missing, unsplit)
		}
	}
	all[2].Staged = u.stage(t, 3, true)[2].Staged
	if added, err := u.add(t, all[2:]); added != 2 || err != nil {
		t.Errorf("once more: %d, %v", added, err)
	}
}

// A layer above one that the store has not got is refused; above one of another store that it reads, it is added.
// The layers of that store stay as they are, and are not added again.
func TestAddAboveAnotherStore(t *testing.T) {
	t.Parallel()
	dir, other := t.TempDir(), t.TempDir()
	below := newStore(t, other, "")
	first := newUnpacker(t, below)
	if added, err := first.add(t, first.stage(t, 1, true)); added != 1 || err != nil {
		t.Fatalf("%d, %v", added, err)
	}
	readOnly := filepath.Join(dir, "read-only") // by its other name this process has it open for writing
	if err := os.Symlink(filepath.Join(other, "root"), readOnly); err != nil {
		t.Fatal(err)
	}
	store := newStore(t, dir, readOnly)
	u := newUnpacker(t, store)
	all := u.stage(t, 3, true)
	if added, err := u.add(t, all[2:]); added != 0 || !errors.Is(err, cstorage.ErrParentUnknown) {
		t.Errorf("without its parent: %d, %v", added, err)
	}
	all[2] = u.stage(t, 3, true)[2]
	if added, err := u.add(t, all); added != 3 || err != nil {
		t.Errorf("%d, %v", added, err)
	}
	if records := recorded(t, store); len(records) != 2 {
		t.Errorf("records %v", records)
	}
	if _, err := os.Stat(filepath.Join(readOnly, "overlay", all[0].ID, "diff", "d", "file0")); err != nil {
		t.Errorf("the other store: %v", err)
	}
}

// What a process that was killed while it added a layer has left is deleted, and is no part of the layer that is
// added then.
func TestAddAfterKilled(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	u := newUnpacker(t, store)
	layer := u.stage(t, 1, true)[0]
	left := filepath.Join(store.GraphRoot(), "overlay", layer.ID, "diff", "half")
	records, err := openRecords(store)
	if err == nil {
		err = records.write([]*cstorage.Layer{{ID: layer.ID, Flags: map[string]any{incomplete: true}}})
		records.unlock()
	}
	if err := errors.Join(err, os.MkdirAll(left, 0o700)); err != nil {
		t.Fatal(err)
	}
	if records, err = lockRecords(store, "", nil); err != nil {
		t.Fatal(err)
	}
	if records.has(layer.ID) {
		t.Error("the layer is still recorded")
	}
	records.unlock()
	if added, err := u.add(t, []layers.Addition{layer}); added != 1 || err != nil {
		t.Errorf("%d, %v", added, err)
	}
	if _, err := os.Stat(left); err == nil {
		t.Error("files of the killed process are in the layer")
	}
	if records := recorded(t, store); len(records) != 1 || records[0]["flags"] != nil {
		t.Errorf("records %v", records)
	}
}

// A layer that was in the store when it would have been unpacked can be removed before the layers above it are added.
// They are not added then, even if its directory was left behind: their records would name a parent that the store has not got.
func TestAddAboveRemoved(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	driver, err := store.GraphDriver()
	if err != nil {
		t.Fatal(err)
	}
	u := newUnpacker(t, store)
	all := u.stage(t, 4, true)
	all[1].Staged = nil
	if err := driver.Create(all[1].ID, "", nil); err != nil {
		t.Fatal(err)
	}
	added, err := u.add(t, all)
	if added != 1 || !errors.Is(err, cstorage.ErrLayerUnknown) {
		t.Errorf("%d, %v", added, err)
	}
	if records := recorded(t, store); len(records) != 1 || records[0]["id"] != all[0].ID || records[0]["flags"] != nil {
		t.Errorf("records %v", records)
	}
	all[1].Staged = u.stage(t, 2, true)[1].Staged
	if added, err := u.add(t, all[1:]); added != 3 || err != nil {
		t.Errorf("once more: %d, %v", added, err)
	}
}

// newSplitStore opens a store of the library whose layers are in another directory than their tar-split data.
func newSplitStore(t *testing.T) (store cstorage.Store, images string) {
	t.Helper()
	dir := t.TempDir()
	images = filepath.Join(dir, "images")
	store, err := cstorage.GetStore(cstorage.StoreOptions{RunRoot: filepath.Join(dir, "run"), GraphRoot: filepath.Join(dir, "root"), ImageStore: images, GraphDriverName: "overlay"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, mounted := range []string{filepath.Join(dir, "root", "overlay"), filepath.Join(images, "overlay")} {
			_ = unix.Unmount(mounted, unix.MNT_DETACH)
		}
	})
	return store, images
}

// Tar-split data that are copied, since they are in another file system than their records, are those of a regular file
// of a size that a layer can have: while they are copied the store is locked. What was refused leaves nothing.
func TestCopiedSplitIsBounded(t *testing.T) {
	t.Parallel()
	for what, replace := range map[string]func(file string) error{
		"sparse": func(file string) error { return os.Truncate(file, 1<<40) },
		"a link": func(file string) error { return errors.Join(os.Remove(file), os.Symlink("/etc/passwd", file)) },
		"a pipe": func(file string) error { return errors.Join(os.Remove(file), unix.Mkfifo(file, 0o600)) },
	} {
		store, _ := newSplitStore(t)
		u := newUnpacker(t, store)
		all := u.stage(t, 1, true)
		ok(t, replace(u.staging.SplitOf("1")))
		if added, err := u.add(t, all); added != 0 || !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: added %d, %v", what, added, err)
		}
		if left, err := filepath.Glob(filepath.Join(store.GraphRoot(), "overlay-layers", "*.tar-split.gz")); len(left) > 0 || err != nil {
			t.Errorf("%s: left %q, %v", what, left, err)
		}
		if _, err := store.Layer(all[0].ID); !errors.Is(err, cstorage.ErrLayerUnknown) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A store with an image store notices layers that were added to it, even if the clock of the file system was too coarse
// to give the records another time. If it did not, its next layer would overwrite their records.
func TestAddToImageStore(t *testing.T) {
	t.Parallel()
	store, images := newSplitStore(t)
	if _, err := store.CreateLayer("before", "", nil, "", false, nil); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(images, "overlay-layers", "layers.json")
	before, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	u := newUnpacker(t, store)
	all := u.stage(t, 2, true)
	if added, err := u.add(t, all); added != 2 || err != nil {
		t.Fatalf("%d, %v", added, err)
	}
	if err := os.Chtimes(file, before.ModTime(), before.ModTime()); err != nil {
		t.Fatal(err)
	}
	if _, err := store.CreateLayer("after", "", nil, "", false, nil); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"before", all[0].ID, all[1].ID, "after"} {
		if _, err := store.Layer(id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
}

// Layers that describe all of their directories are added together with one above them that does not, above a layer that the
// store has had: its directories come from that one, and from those that are being added.
func TestAddInheritsThroughAddedLayers(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	first := newUnpacker(t, store)
	bottom := first.stage(t, 1, true)
	if added, err := first.add(t, bottom); added != 1 || err != nil {
		t.Fatalf("%d, %v", added, err)
	}
	base := filepath.Join(store.GraphRoot(), "overlay", bottom[0].ID, "diff", "d")
	if err := os.Chmod(base, 0o750); err != nil {
		t.Fatal(err)
	}
	u := newUnpacker(t, store) // of an image that shares the first layer
	all := u.stage(t, 4, true)
	all[0].Staged = nil
	all[3].Staged = u.stage(t, 1, false)[0].Staged
	for n := 2; n <= 3; n++ { // they are no longer there
		if err := os.RemoveAll(filepath.Join(u.dir(n), "d")); err != nil {
			t.Fatal(err)
		}
	}
	if added, err := u.add(t, all); added != 4 || err != nil {
		t.Fatalf("%d, %v", added, err)
	}
	st, err := os.Stat(filepath.Join(store.GraphRoot(), "overlay", all[3].ID, "diff", "d"))
	if err != nil || st.Mode().Perm() != 0o750 {
		t.Errorf("%v, %v", st, err)
	}
}

// An incomplete layer that the library could not delete, since no file could be made, is deleted once that is possible. The
// library that has tried takes the layer for complete until somebody writes the records.
func TestAddAfterFailedCleanup(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m,nr_inodes=200"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	store := newStore(t, dir, "")
	u := newUnpacker(t, store)
	layer := u.stage(t, 1, true)[0]
	records, err := openRecords(store)
	if err == nil {
		err = records.write([]*cstorage.Layer{{ID: layer.ID, Flags: map[string]any{incomplete: true}}})
		records.unlock()
	}
	filler := filepath.Join(dir, "filler")
	if err := errors.Join(err, os.Mkdir(filler, 0o700)); err != nil {
		t.Fatal(err)
	}
	for i := 0; err == nil; i++ {
		err = os.WriteFile(filepath.Join(filler, fmt.Sprint(i)), nil, 0o600)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if _, err := store.Layers(); err == nil {
		t.Error("the library could delete the layer")
	}
	if added, err := u.add(t, []layers.Addition{layer}); added != 0 || err == nil {
		t.Errorf("%d, %v", added, err)
	}
	if err := os.RemoveAll(filler); err != nil {
		t.Fatal(err)
	}
	if added, err := u.add(t, []layers.Addition{layer}); added != 1 || err != nil {
		t.Errorf("%d, %v", added, err)
	}
	if records := recorded(t, store); len(records) != 1 || records[0]["flags"] != nil {
		t.Errorf("records %v", records)
	}
}

// A layer that another pull has added meanwhile is not added again, and what was unpacked of it is deleted.
func TestAddWhatAnotherPullHasAdded(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	first, second := newUnpacker(t, store), newUnpacker(t, store)
	theirs, ours := first.stage(t, 1, true), second.stage(t, 2, true)
	if added, err := first.add(t, theirs); added != 1 || err != nil {
		t.Fatalf("%d, %v", added, err)
	}
	if added, err := second.add(t, ours); added != 2 || err != nil {
		t.Errorf("%d, %v", added, err)
	}
	for n := 1; n <= 2; n++ {
		if _, err := os.Lstat(second.dir(n)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("layer %d is left unpacked: %v", n, err)
		}
	}
	if records := recorded(t, store); len(records) != 2 {
		t.Errorf("records %v", records)
	}
}
