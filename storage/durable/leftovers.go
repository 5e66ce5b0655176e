package durable

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/flock"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/internal/tree"
)

// Leftovers removes what unfinished pulls and removals leave in the store: temporary files of a
// pull, layers without an image, an image without its manifest, and manifests and configs without
// an image record.
//
// Every pull and removal writes a job, a directory under a file lock, before it begins, and deletes
// it at its end. A job whose work failed, or whose process died, names the layers to check: those
// made since it began, and those that it lists. containers/storage itself refuses to delete a layer
// that an image, a container or another layer needs. A layer that a running pull may build on or
// copy from, as the digests of its job say, stays until that pull ends. A layer that another tool
// has just pulled, before it makes the image, looks like one of ours: the other tool's pull fails
// and must be repeated.
type Leftovers struct {
	store cstorage.Store
	locks *Locks
	dir   string

	// OrphanAge is how old a layer without an image, or an image without a manifest, must be to count
	// as left over: another tool may be about to make the image.
	OrphanAge time.Duration

	// Removals changes whenever the deletion of an image begins or ends: a running pull may have
	// found its layers. Sweeping changes nothing here, since it spares the layers that pulls may
	// need.
	Removals atomic.Uint64

	mu      sync.Mutex // also held while layers are swept, so that no pull begins to build on them
	running []*Job
	left    []*Job // jobs that have ended, but of which something remains
}

// Job is a pull or removal in progress.
type Job struct {
	all       *Leftovers
	dir       string
	Lock      *os.File // open while the job is at work; a worker inherits it
	start     time.Time
	removal   bool     // false: a pull
	layers    []string // to check, whenever they were made
	image     string   // being pulled; empty: its id is unknown
	needs     Needs
	Temporary string // directory for large files; a removal has none
	swept     bool   // of its layers only those in layers remain, because running pulls may need them
	settled   bool   // its layers need no check: it succeeded, or they have been checked
}

const (
	jobsName      = "crius-pulls" // directory in the graph root
	layersName    = "layers"
	imageName     = "image"
	temporaryName = "temporary"   // link to a directory elsewhere
	temporaryMark = "crius-pull-" // which begins so
)

// NewLeftovers returns the leftovers of a store. It reads and writes nothing yet.
func NewLeftovers(store cstorage.Store, locks *Locks) *Leftovers {
	return &Leftovers{store: store, locks: locks, dir: filepath.Join(store.GraphRoot(), jobsName), OrphanAge: orphanAge}
}

// Needs are the layers that a pull relies on while it runs.
type Needs struct {
	Layers  []string        // ids of the image's layers, present or not
	Digests []digest.Digest // of layers from which it may copy, compressed or not
}

// PreparePull starts a job for an image that is not known yet, with a directory for large files: below
// parent or, if that is empty, in the job. Until Begin the pull must not change the store.
func (d *Leftovers) PreparePull(ctx context.Context, parent string) (*Job, error) {
	j, err := d.makeJob(ctx)
	if err != nil {
		return nil, err
	}
	j.Temporary = j.dir
	if parent == "" {
		return j, nil
	}
	j.Temporary = filepath.Join(parent, temporaryMark+filepath.Base(j.dir))
	err = trace.Call(ctx, "make temporary directory", func() error {
		if err := os.Symlink(j.Temporary, filepath.Join(j.dir, temporaryName)); err != nil {
			return err
		}
		return os.Mkdir(j.Temporary, 0o700)
	})
	if err != nil {
		j.End(ctx, true)
		return nil, fmt.Errorf("temporary directory of the pull: %w", err)
	}
	return j, nil
}

// Begin says what the job is for: an image, whose id is empty if it is unknown. From now on layers that it needs are not
// swept while it runs, and those that are made may be its own.
func (j *Job) Begin(ctx context.Context, image string, needs Needs) error {
	j.image, j.needs = image, needs
	j.run()
	return j.note(ctx, imageName, image)
}

// note writes down a fact about the job, for the next process.
func (j *Job) note(ctx context.Context, name, text string) error {
	return trace.Call(ctx, "write job "+name, func() error { return os.WriteFile(filepath.Join(j.dir, name), []byte(text), 0o600) })
}

// BeginRemoval starts a job that removes layers.
func (d *Leftovers) BeginRemoval(ctx context.Context, layers []string) (*Job, error) {
	j, err := d.makeJob(ctx)
	if err != nil {
		return nil, err
	}
	j.removal, j.layers = true, layers
	j.run()
	if err := j.note(ctx, layersName, strings.Join(layers, "\n")); err != nil {
		j.End(ctx, true)
		return nil, err
	}
	return j, nil
}

// run adds the job to those that are running: what is made in the store from now on may be its own.
func (j *Job) run() {
	j.all.mu.Lock()
	defer j.all.mu.Unlock()
	j.start = time.Now()
	j.all.running = append(j.all.running, j)
}

// makeJob makes the directory of a job. It does not wait while layers are swept.
func (d *Leftovers) makeJob(ctx context.Context) (*Job, error) {
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	for range 3 { // a process that starts may delete a directory that is not locked yet
		start := time.Now()
		dir := filepath.Join(d.dir, fmt.Sprintf("%d-%s", start.UnixNano(), rand.Text()))
		if err = trace.Call(ctx, "make job directory", func() error { return os.Mkdir(dir, 0o700) }); err != nil {
			_ = os.Remove(dir)
			return nil, err
		}
		var lock *os.File
		if lock, err = lockDir(dir); err != nil {
			continue
		}
		if _, err = os.Stat(dir); err != nil {
			lock.Close()
			continue
		}
		return &Job{all: d, dir: dir, Lock: lock, start: start}, nil
	}
	return nil, err
}

// lockDir locks a directory until the file is closed or the process ends.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := flock.Try(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// End deletes the job's files. The layers of failed work are deleted, except those that running
// pulls may need: these are deleted when such pulls end and no image has them.
func (j *Job) End(ctx context.Context, succeeded bool) {
	d := j.all
	if err := trace.Call(ctx, "remove temporary files", j.removeFiles); err != nil {
		slog.WarnContext(ctx, "cannot remove temporary files of a pull; the next pull or start retries", "path", j.Temporary, "err", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running = slices.DeleteFunc(d.running, func(other *Job) bool { return other == j })
	j.settled = succeeded
	if !succeeded || j.forget(ctx) != nil {
		d.left = append(d.left, j)
	}
	var err error
	ctx = context.WithoutCancel(ctx)
	d.left, err = d.sweep(ctx, d.left)
	if j.removal || !succeeded {
		err = errors.Join(err, d.settleShortNames(ctx))
	}
	if err != nil {
		slog.WarnContext(ctx, "cannot remove leftovers of unfinished pulls; the next pull or start retries", "err", err)
	}
}

// removeFiles deletes the large files, among which a worker may have nested directories as deep as it liked.
func (j *Job) removeFiles() error {
	if j.Temporary == "" {
		return nil
	}
	if j.Temporary != j.dir {
		return tree.Remove(j.Temporary)
	}
	entries, err := os.ReadDir(j.dir)
	for _, entry := range entries {
		if entry.Name() != imageName { // the image id stays until the job is deleted
			err = errors.Join(err, tree.Remove(filepath.Join(j.dir, entry.Name())))
		}
	}
	return err
}

// forget deletes the job itself. Nothing else of it may remain, since nobody would find it.
func (j *Job) forget(ctx context.Context) error {
	err := trace.Call(ctx, "delete job", func() error {
		if err := j.removeFiles(); err != nil {
			return err
		}
		return os.RemoveAll(j.dir)
	})
	if err == nil {
		j.Lock.Close()
	}
	return err
}

// Recover ends the jobs of processes that died.
func (d *Leftovers) Recover(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	unwritten := errors.Join(
		trace.Do(ctx, "delete partial record files", d.sweepWrites),
		trace.Do(ctx, "delete descriptions of archives without layers", d.sweepDescriptions))
	entries, err := os.ReadDir(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return unwritten
	}
	err = errors.Join(unwritten, err)
	var dead []*Job
	alive := false
	for _, entry := range entries {
		j, readErr := d.read(ctx, entry.Name())
		switch {
		case errors.Is(readErr, flock.ErrBusy):
			alive = true
		case readErr != nil:
			err = errors.Join(err, readErr)
		case j != nil:
			err = errors.Join(err, trace.Call(ctx, "remove temporary files", j.removeFiles))
			dead = append(dead, j)
		}
	}
	if alive { // another process pulls, and may build on those layers
		for _, j := range dead {
			j.Lock.Close()
		}
		return err
	}
	left, sweepErr := d.sweep(ctx, dead)
	d.left = left // until the end of the next pull
	// The job of a pull that succeeded is gone, even if what its worker has left could not be deleted.
	return errors.Join(err, sweepErr, d.sweepUnpacked(), d.settleShortNames(ctx))
}

// settleShortNames deletes those of layers that the library has deleted: in an imagestore it leaves them.
func (d *Leftovers) settleShortNames(ctx context.Context) error {
	roots := RootsOf(d.store)
	if roots.Images == "" {
		return nil
	}
	return SettleShortNames(ctx, roots, d.locks)
}

// dyingTime is how long a killed process may take to release its locks, and its children to release
// inherited ones.
const dyingTime = 2 * time.Second

// read locks and reads the job of a dead process, or returns nil if there is none.
func (d *Leftovers) read(ctx context.Context, name string) (*Job, error) {
	dir := filepath.Join(d.dir, name)
	var lock *os.File
	var err error
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dyingTime)
	defer cancel()
	poll.Until(ctx, dyingTime/100, func() bool {
		lock, err = lockDir(dir)
		return !errors.Is(err, flock.ErrBusy)
	})
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			err = nil
		}
		return nil, err
	}
	j := &Job{all: d, dir: dir, Lock: lock, start: time.Now()}
	if list, err := os.ReadFile(filepath.Join(dir, layersName)); err == nil {
		j.removal, j.layers = true, strings.Fields(string(list))
		return j, nil
	}
	if image, err := os.ReadFile(filepath.Join(dir, imageName)); err == nil { // otherwise the pull has not begun
		j.image, j.start = string(image), begun(dir)
	}
	j.Temporary = dir
	if elsewhere, err := os.Readlink(filepath.Join(dir, temporaryName)); err == nil &&
		strings.HasPrefix(filepath.Base(elsewhere), temporaryMark) {
		j.Temporary = elsewhere
	}
	return j, nil
}

// begun returns when a pull began, by the directory of its job. The name says when that was made, the image id when it
// was written: not as exactly, but maybe long afterwards.
func begun(dir string) (start time.Time) {
	since, _, _ := strings.Cut(filepath.Base(dir), "-")
	if nanoseconds, err := strconv.ParseInt(since, 10, 64); err == nil {
		start = time.Unix(0, nanoseconds)
	}
	if st, err := os.Stat(filepath.Join(dir, imageName)); err == nil && st.ModTime().After(start) {
		start = st.ModTime()
	}
	return start
}

// Close unlocks the jobs that remain, for the next start.
func (d *Leftovers) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, j := range d.left {
		errs = append(errs, j.Lock.Close())
	}
	d.left = nil
	return errors.Join(errs...)
}

// Remove deletes all jobs, for a wipe.
func (d *Leftovers) Remove() error { return os.RemoveAll(d.dir) }

const orphanAge = time.Hour

// Orphans returns old layers that no image, container or other layer needs, and no running pull may
// need. It returns none while a removal is in progress or incomplete.
func (d *Leftovers) Orphans() ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	removes := func(j *Job) bool { return j.removal }
	unswept := func(j *Job) bool { return !j.settled && !j.swept }
	if slices.ContainsFunc(d.running, removes) || slices.ContainsFunc(d.left, unswept) {
		return nil, nil
	}
	orphans, _, err := d.orphans()
	if err != nil {
		return nil, fmt.Errorf("search for layers without an image: %w", err)
	}
	var ids []string
	for _, layer := range orphans {
		if time.Since(layer.Created) > d.OrphanAge {
			ids = append(ids, layer.ID)
		}
	}
	return ids, nil
}

// InTheMaking reports whether a program may be about to write the manifest of an image without one.
func (d *Leftovers) InTheMaking(image *cstorage.Image) bool {
	return time.Since(lastWrite(RootsOf(d.store), image.ID)) <= d.OrphanAge
}

// lastWrite returns when a document of an image was written last. While it has none, that is when
// the records of images were.
func lastWrite(roots Roots, image string) (last time.Time) {
	for _, name := range []string{image, filepath.Base(imagesFile)} {
		for _, root := range roots.All() {
			st, err := os.Stat(filepath.Join(root, filepath.Dir(imagesFile), name))
			if err == nil && st.ModTime().After(last) {
				last = st.ModTime()
			}
		}
		if !last.IsZero() {
			break
		}
	}
	return last
}

// DeleteOrphan deletes a layer like the leftover of unfinished work.
func (d *Leftovers) DeleteOrphan(ctx context.Context, layer string) error {
	j, err := d.BeginRemoval(ctx, []string{layer})
	if err != nil {
		return err
	}
	j.End(ctx, false)
	left, err := d.Orphans()
	if err == nil && slices.Contains(left, layer) {
		err = fmt.Errorf("layer %s is still there; another program may be using it", layer)
	}
	return err
}
