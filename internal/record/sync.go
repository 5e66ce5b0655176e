package record

import (
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/backoff"
)

// syncDelay is how much of the latest work a power cut may undo, plus the time
// that the disk then takes. A starting pod writes its documents seven times
// within it.
const syncDelay = time.Second

// kernelDelay is longer than the kernel keeps a change in memory only, unless
// configured otherwise (vm.dirty_expire_centisecs).
const kernelDelay = time.Minute

const lastSuffix = ".last"

// write replaces the document of id, and keeps the one that is on disk.
func (d *Dir[T]) write(id string, data []byte) error {
	path := d.file(id)
	tmp := path + ".tmp"
	err := os.WriteFile(tmp, data, 0o600)
	if err == nil {
		err = d.replace(id, tmp)
	}
	if err != nil {
		return errors.Join(err, remove(tmp))
	}
	return nil
}

func (d *Dir[T]) replace(id, tmp string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	path := d.file(id)
	if _, unsynced := d.changed[id]; !unsynced {
		// If there is one already, no later one is known to be on disk.
		err := os.Link(path, path+lastSuffix)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	replaced, err := swap(tmp, path)
	if err != nil {
		return err
	}
	d.changeLocked(id, !replaced)
	return nil
}

// swap puts tmp in place of path, and reports whether it has replaced a file. It
// exchanges the two instead of renaming one over the other, because on a rename
// ext4 would begin to write the new file to disk (auto_da_alloc), and most
// documents are replaced before their sync.
func swap(tmp, path string) (replaced bool, err error) {
	err = unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	if err != nil { // there is none yet, or the file system cannot exchange
		return false, os.Rename(tmp, path)
	}
	_ = os.Remove(tmp) // otherwise the next write removes it
	return true, nil
}

// change schedules a sync of the change to id. With entry, the directory of id
// may be new or gone.
func (d *Dir[T]) change(id string, entry bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.changeLocked(id, entry)
}

func (d *Dir[T]) changeLocked(id string, entry bool) {
	d.changes++
	d.changed[id] = d.changes
	if entry {
		d.entries = d.changes
	}
	if !d.syncing {
		d.syncing = true
		d.syncSoon(d.pauses())
	}
}

// syncSoon syncs after a pause, and again until nothing is left to sync.
func (d *Dir[T]) syncSoon(pauses *backoff.Backoff) {
	time.AfterFunc(pauses.Next(), func() {
		if err := d.Sync(); err != nil {
			slog.Warn("cannot sync records to disk, a power failure may lose the latest changes: check the disk", "err", err)
		} else {
			pauses = d.pauses()
		}
		d.mu.Lock()
		d.syncing = len(d.changed) > 0
		again := d.syncing
		d.mu.Unlock()
		if again {
			d.syncSoon(pauses)
		}
	})
}

func (d *Dir[T]) pauses() *backoff.Backoff { return backoff.New(d.delay, time.Minute) }

// Sync writes all earlier changes to disk. A document that cannot be synced
// exists nevertheless, but a power cut may bring back its predecessor.
func (d *Dir[T]) Sync() error {
	d.mu.Lock()
	batch := maps.Clone(d.changed)
	d.mu.Unlock()
	return d.sync(batch)
}

// SyncOne is Sync for one document, and does nothing if that is on disk.
func (d *Dir[T]) SyncOne(id string) error {
	d.mu.Lock()
	change, unsynced := d.changed[id]
	d.mu.Unlock()
	if !unsynced {
		return nil
	}
	return d.sync(map[string]uint64{id: change})
}

func (d *Dir[T]) sync(batch map[string]uint64) error {
	failed := map[string]error{}
	for id := range batch {
		failed[id] = errors.Join(d.fsync(d.file(id)), d.fsync(d.Path(id)))
	}
	rootErr := d.syncRoot()

	d.mu.Lock()
	defer d.mu.Unlock()
	errs := []error{rootErr}
	for id, change := range batch {
		err := failed[id]
		if err == nil && rootErr == nil && d.changed[id] == change { // and not changed again in the meantime
			if err = remove(d.file(id) + lastSuffix); err == nil {
				delete(d.changed, id)
			}
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// syncRoot syncs the names of the documents' directories, unless they are on disk.
// It must not rely on a sync that has begun and not ended.
func (d *Dir[T]) syncRoot() error {
	d.mu.Lock()
	entries := d.entries
	synced := entries <= d.entriesSynced
	d.mu.Unlock()
	if synced {
		return nil
	}
	if err := d.fsync(d.root); err != nil {
		return err
	}
	d.mu.Lock()
	d.entriesSynced = max(d.entriesSynced, entries)
	d.mu.Unlock()
	return nil
}

// settle handles a document that an earlier process may not have synced. If a
// power cut has spoiled it, the previous one replaces it.
func (d *Dir[T]) settle(id string) error {
	file := d.file(id)
	last, err := os.Lstat(file + lastSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		if st, err := os.Lstat(file); err == nil && time.Since(st.ModTime()).Abs() < kernelDelay {
			d.change(id, false)
		}
		return nil
	}
	if err != nil {
		return err
	}
	switch _, err := d.read(id, file); {
	case errors.Is(err, errSpoiled):
		slog.Warn("damaged record, restored the previous one", "file", file, "err", err, "written", last.ModTime())
		if err := os.Rename(file+lastSuffix, file); err != nil {
			return err
		}
	case err != nil:
		return nil //nolint:nilerr // it may be the better one later or to another program, and a sync would remove the one before
	}
	d.change(id, false)
	return nil
}

// syncFile syncs a file or directory. A removed file needs no sync.
func syncFile(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	// Some file systems cannot fsync a directory and return EINVAL: there a
	// rename is as durable as it can be.
	err = f.Sync()
	if errors.Is(err, unix.EINVAL) {
		err = nil
	}
	return errors.Join(err, f.Close())
}

// remove ignores a missing file.
func remove(path string) error {
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
