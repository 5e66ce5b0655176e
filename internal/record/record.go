// Package record keeps one JSON document per object in a directory tree, so
// that a document is either complete or absent, whenever the process or the
// machine dies.
//
//	<root>/<id>/<name>      the document
//	<root>/<id>/<name>.last the previous one, until the document is on disk
//	<root>/<id>/…           whatever else the owner keeps beside it
//	<root>/damaged/<id>.<n> documents that could not be read
//
// Put writes a temporary file and renames it to the document: when it returns,
// the document survives the process. A background sync follows syncDelay later,
// together with all documents put in the meantime: a container's start does not
// wait for a busy disk (docs/decisions/0012-records.md). The root is synced only
// if a directory in it is new or gone. Until then the
// previous document, which is on disk, is kept under its own name, and replaces
// the new one if a power cut has spoiled that, as file systems do to files that
// were renamed before they were synced. Delete is the mirror image: the unlink
// of the document is the commit, and a power cut within that time may undo it.
//
// All moves aside and reports a document that cannot be decoded, or whose
// version is unknown. Such a document never prevents the others from being
// read. A document that cannot be read because descriptors or memory are used
// up is not judged: All fails, and its caller tries again later.
package record

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
)

// Dir is a directory of documents of type T. Methods may be called
// concurrently; the caller orders calls for the same id.
type Dir[T any] struct {
	root    string
	name    string
	version int

	mu      sync.Mutex        // held while names change, not while content is written
	changed map[string]uint64 // ids whose change may not be on disk yet, with the number of the change
	changes uint64
	entries uint64 // number of the last change that made or removed a directory in root
	// entriesSynced is what entries was when the last successful sync of root began.
	entriesSynced uint64
	syncing       bool                    // a goroutine will sync
	delay         time.Duration           // syncDelay
	fsync         func(path string) error // syncFile
}

// Damaged is a document that All could not read.
type Damaged struct {
	ID   string
	File string // path of the document, after All has moved it; empty: it could not be moved
	Err  error
}

// envelope lets All distinguish a document of another version from a damaged
// one before it decodes the body.
type envelope[T any] struct {
	Version int `json:"version"`
	Body    *T  `json:"body"`
}

const damagedDir = "damaged"

var errSpoiled = errors.New("is not valid JSON")

// At returns the documents called name below root. Nothing can be put there until Make has made it.
func At[T any](root, name string, version int) *Dir[T] {
	const byEarlierProcess = 1 // change, which may not be on disk
	return &Dir[T]{
		root: root, name: name, version: version, changed: map[string]uint64{},
		changes: byEarlierProcess, entries: byEarlierProcess, delay: syncDelay, fsync: syncFile,
	}
}

// Make makes the root.
func (d *Dir[T]) Make() error { return os.MkdirAll(d.root, 0o700) }

func (d *Dir[T]) file(id string) string { return filepath.Join(d.root, id, d.name) }

// Path returns the directory of id, whether it exists or not.
func (d *Dir[T]) Path(id string) string { return filepath.Join(d.root, id) }

// Put makes doc the document of id, and schedules its sync; a caller that must
// know that it is on disk calls Sync. If Put fails and there was no document,
// nothing of it is left.
func (d *Dir[T]) Put(ctx context.Context, id string, doc *T) error {
	data, err := json.Marshal(envelope[T]{Version: d.version, Body: doc})
	if err != nil {
		return fmt.Errorf("encode record %s: %w", id, err)
	}
	created, err := d.makeDir(ctx, id)
	if err == nil {
		err = trace.Call(ctx, "write record", func() error { return d.write(id, data) })
	}
	if err == nil {
		return nil
	}
	if created { // by a caller that has nothing of this id, and will not retry
		err = errors.Join(err, os.RemoveAll(d.Path(id)))
	}
	return fmt.Errorf("write record %s: %w", id, err)
}

// makeDir makes a missing directory of id. It need not be synced: a directory
// without a document is an orphan.
func (d *Dir[T]) makeDir(ctx context.Context, id string) (created bool, err error) {
	if _, err := os.Stat(d.Path(id)); !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	err = trace.Call(ctx, "make state directory", func() error {
		if err := os.Mkdir(d.Path(id), 0o700); err != nil {
			return err
		}
		created = true
		return nil
	})
	return created, err
}

// Get reads the document of id: the previous one if a power cut came before the
// sync. A missing one is fault.NotFound. After an error that is fault.Scarce
// another call may succeed.
func (d *Dir[T]) Get(id string) (*T, error) {
	doc, err := d.read(id, d.file(id))
	if err != nil && !errors.Is(err, fault.NotFound) && !fault.Scarce(err) {
		if last, lastErr := d.read(id, d.file(id)+lastSuffix); lastErr == nil {
			return last, nil
		}
	}
	return doc, err
}

func (d *Dir[T]) read(id, file string) (*T, error) {
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("record %s %w", id, fault.NotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("record %s: %w", id, err)
	}
	var e envelope[T]
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("record %s %w: %w", id, errSpoiled, err)
	}
	if e.Version != d.version || e.Body == nil {
		return nil, fmt.Errorf("record %s has version %d, this version of crius reads version %d", id, e.Version, d.version)
	}
	return e.Body, nil
}

// Delete removes the document of id and then its directory with everything
// that the owner left in it. It is idempotent.
func (d *Dir[T]) Delete(ctx context.Context, id string) error {
	dir := d.Path(id)
	err := trace.Call(ctx, "delete record", func() error { return os.Remove(d.file(id)) })
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err = trace.Call(ctx, "remove state directory", func() error { return os.RemoveAll(dir) })
	d.change(id, true)
	return err
}

// All reads every document, in parallel. Orphans are the ids of directories
// without a (readable) document: what a crash between mkdir and Put, or in the
// middle of Delete, leaves behind. The caller deletes them, including those
// whose damaged document cannot be moved aside, as on a full disk.
func (d *Dir[T]) All() (docs map[string]*T, orphans []string, damaged []Damaged, err error) {
	docs, orphans, damaged, err = d.Read()
	for i := range damaged {
		file, err := d.moveAside(damaged[i].ID)
		if err != nil {
			file, damaged[i].Err = "", fmt.Errorf("%w, and it cannot be moved aside: %w", damaged[i].Err, err)
		}
		damaged[i].File = file
		orphans = append(orphans, damaged[i].ID)
	}
	for id := range docs {
		if err := d.settle(id); err != nil {
			return nil, nil, nil, fmt.Errorf("record %s: %w", id, err)
		}
	}
	return docs, orphans, damaged, err
}

// Read is All without changes: damaged documents stay where they are, and are
// not orphans. A missing root has no documents.
func (d *Dir[T]) Read() (docs map[string]*T, orphans []string, damaged []Damaged, err error) {
	entries, err := os.ReadDir(d.root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil, err
	}
	docs = make(map[string]*T, len(entries))
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(4 * runtime.GOMAXPROCS(0))
	for _, entry := range entries {
		id := entry.Name()
		if id == damagedDir || !entry.IsDir() {
			continue
		}
		g.Go(func() error {
			doc, err := d.Get(id)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				docs[id] = doc
			case errors.Is(err, fault.NotFound):
				orphans = append(orphans, id)
			case fault.Scarce(err):
				return err
			default:
				damaged = append(damaged, Damaged{ID: id, File: d.file(id), Err: err})
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, nil, nil, err
	}
	return docs, orphans, damaged, nil
}

// moveAside keeps a damaged document for a human, under an unused name.
func (d *Dir[T]) moveAside(id string) (string, error) {
	aside := filepath.Join(d.root, damagedDir)
	if err := os.MkdirAll(aside, 0o700); err != nil {
		return "", err
	}
	for n := 0; ; n++ {
		file := filepath.Join(aside, fmt.Sprintf("%s.%d", id, n))
		err := unix.Renameat2(unix.AT_FDCWD, d.file(id), unix.AT_FDCWD, file, unix.RENAME_NOREPLACE)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		return file, err
	}
}
