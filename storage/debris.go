package storage

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/trace"
)

// debris keeps the store free of what unfinished work leaves: the temporary
// files of a pull, layers that no image came to own or still owns, and what the
// library kept beside an image's record.
//
// Every pull and removal writes a job, a directory under a file lock, before
// it begins and deletes it at its end. A job whose work failed, or whose
// process died, names the layers to look at: those made since it began, and
// those that it lists. containers/storage itself refuses to delete a layer
// that an image, a container or another layer needs. A layer that another tool
// has just pulled, for an image that is still to come, cannot be told from
// ours: that pull fails and has to be repeated.
type debris struct {
	store cstorage.Store
	locks *locks
	dir   string

	strayAge time.Duration // see there

	// removals changes whenever the deletion of layers begins or ends.
	removals atomic.Uint64

	mu      sync.Mutex // also held while layers are swept, so that no pull builds on them
	running int
	left    []*job // that have ended, but for something that remains of them
}

// job is one pull or removal under way.
type job struct {
	debris    *debris
	dir       string
	lock      *os.File
	start     time.Time
	layers    []string // to look at, whenever they were made
	temporary string   // directory for large files
	settled   bool     // its layers need not be looked at, for it succeeded or they have been
}

const (
	jobsName      = "crius-pulls"
	layersName    = "layers"
	temporaryName = "temporary"   // link to a directory elsewhere
	temporaryMark = "crius-pull-" // which begins so
)

func newDebris(store cstorage.Store, locks *locks) *debris {
	return &debris{store: store, locks: locks, dir: filepath.Join(store.GraphRoot(), jobsName), strayAge: strayAge}
}

// beginPull starts a job with a directory for large files, below parent or,
// without one, within the job.
func (d *debris) beginPull(ctx context.Context, parent string) (*job, error) {
	j, err := d.begin(ctx)
	if err != nil {
		return nil, err
	}
	j.temporary = j.dir
	if parent == "" {
		return j, nil
	}
	j.temporary = filepath.Join(parent, temporaryMark+filepath.Base(j.dir))
	err = trace.Call(ctx, "make temporary directory", func() error {
		if err := os.Symlink(j.temporary, filepath.Join(j.dir, temporaryName)); err != nil {
			return err
		}
		return os.Mkdir(j.temporary, 0o700)
	})
	if err != nil {
		j.end(ctx, true)
		return nil, fmt.Errorf("temporary directory of the pull: %w", err)
	}
	return j, nil
}

// beginRemoval starts a job that is about layers.
func (d *debris) beginRemoval(ctx context.Context, layers []string) (*job, error) {
	j, err := d.begin(ctx)
	if err != nil {
		return nil, err
	}
	j.layers = layers
	list := strings.Join(layers, "\n")
	err = trace.Call(ctx, "note layers", func() error { return os.WriteFile(filepath.Join(j.dir, layersName), []byte(list), 0o600) })
	if err != nil {
		j.end(ctx, true)
		return nil, err
	}
	return j, nil
}

func (d *debris) begin(ctx context.Context) (*job, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	for range 3 { // another process that starts may sweep what is not locked yet
		start := time.Now()
		dir := filepath.Join(d.dir, fmt.Sprintf("%d-%s", start.UnixNano(), rand.Text()))
		if err = trace.Call(ctx, "note job", func() error { return os.Mkdir(dir, 0o700) }); err != nil {
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
		d.running++
		return &job{debris: d, dir: dir, lock: lock, start: start}, nil
	}
	return nil, err
}

// errBusy: another process has the lock.
var errBusy = errors.New("locked by another process")

// lockDir locks a directory until the file is closed or the process ends.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = errBusy
		}
		return nil, &os.PathError{Op: "flock", Path: dir, Err: err}
	}
	return f, nil
}

// end deletes the job's files. The layers of failed work go when no other work
// is under way, which might be building on them.
func (j *job) end(ctx context.Context, succeeded bool) {
	d := j.debris
	if err := trace.Call(ctx, "remove temporary files", j.removeFiles); err != nil {
		slog.WarnContext(ctx, "cannot remove temporary files of a pull; the next pull or start retries", "path", j.temporary, "err", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running--
	j.settled = succeeded
	if !succeeded || j.forget(ctx) != nil {
		d.left = append(d.left, j)
	}
	if d.running > 0 {
		return
	}
	var err error
	if d.left, err = d.sweep(ctx, d.left); err != nil {
		slog.WarnContext(ctx, "cannot remove leftovers of unfinished pulls; the next pull or start retries", "err", err)
	}
}

// removeFiles deletes what is large.
func (j *job) removeFiles() error {
	if j.temporary == "" {
		return nil
	}
	if j.temporary != j.dir {
		return os.RemoveAll(j.temporary)
	}
	entries, err := os.ReadDir(j.dir)
	for _, entry := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(j.dir, entry.Name())))
	}
	return err
}

// forget deletes the job itself, of which nothing else may remain: nobody would
// know of it.
func (j *job) forget(ctx context.Context) error {
	err := trace.Call(ctx, "forget job", func() error {
		if err := j.removeFiles(); err != nil {
			return err
		}
		return os.RemoveAll(j.dir)
	})
	if err == nil {
		j.lock.Close()
	}
	return err
}

// recover ends the jobs of processes that died.
func (d *debris) recover(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	unwritten := trace.Do(ctx, "delete half records", d.sweepWrites)
	entries, err := os.ReadDir(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return unwritten
	}
	err = errors.Join(unwritten, err)
	var dead []*job
	alive := false
	for _, entry := range entries {
		j, readErr := d.read(ctx, entry.Name())
		switch {
		case errors.Is(readErr, errBusy):
			alive = true
		case readErr != nil:
			err = errors.Join(err, readErr)
		case j != nil:
			err = errors.Join(err, trace.Call(ctx, "remove temporary files", j.removeFiles))
			dead = append(dead, j)
		}
	}
	if alive { // another process pulls and may build on those layers
		for _, j := range dead {
			j.lock.Close()
		}
		return err
	}
	left, sweepErr := d.sweep(ctx, dead)
	d.left = left // for the end of the next pull
	return errors.Join(err, sweepErr)
}

// dyingTime is how long a process that was killed may take to let go of its
// locks, and its children of what they inherited.
const dyingTime = 2 * time.Second

// read locks and reads the job of a dead process; nil if there is none.
func (d *debris) read(ctx context.Context, name string) (*job, error) {
	dir := filepath.Join(d.dir, name)
	var lock *os.File
	var err error
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dyingTime)
	defer cancel()
	poll.Until(ctx, dyingTime/100, func() bool {
		lock, err = lockDir(dir)
		return !errors.Is(err, errBusy)
	})
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			err = nil
		}
		return nil, err
	}
	j := &job{debris: d, dir: dir, lock: lock, start: time.Now()}
	if list, err := os.ReadFile(filepath.Join(dir, layersName)); err == nil {
		j.layers = strings.Fields(string(list))
		return j, nil
	}
	j.temporary = dir
	since, _, _ := strings.Cut(name, "-")
	if nanoseconds, err := strconv.ParseInt(since, 10, 64); err == nil {
		j.start = time.Unix(0, nanoseconds)
	}
	if elsewhere, err := os.Readlink(filepath.Join(dir, temporaryName)); err == nil &&
		strings.HasPrefix(filepath.Base(elsewhere), temporaryMark) {
		j.temporary = elsewhere
	}
	return j, nil
}

// close lets go of what remains, for the next start.
func (d *debris) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, j := range d.left {
		errs = append(errs, j.lock.Close())
	}
	d.left = nil
	return errors.Join(errs...)
}
