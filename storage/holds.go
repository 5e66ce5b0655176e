package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/durable"
)

// holds keep the images that root file systems use.
//
// A hold is a container record in containers/storage, one for each image in use. It makes the
// library refuse to delete the image, in any program. It is not a volatile record, although it need
// not survive a power cut: versions of the library before 1.45 do not see volatile records. It
// outlives its last user by a short grace period, so that pods which come and go one after the
// other find it.
type holds struct {
	store     cstorage.Store
	locks     *durable.Locks
	leftovers *durable.Leftovers
	grace     time.Duration

	mu      sync.Mutex
	images  map[string]*hold
	adopted bool           // the users of all images are known
	owner   owners         // nil: the store is read-only or closed
	expiry  sync.WaitGroup // timers that are set
}

// hold is the state of one image. Its lock is held over calls of containers/storage; work on other
// images continues meanwhile.
type hold struct {
	image  string
	owners int // goroutines that use it, guarded by holds.mu

	mu    sync.Mutex
	users map[string]bool // ids of root file systems
	kept  bool            // the record exists
	lower []string        // the image's layer directories, top first, while kept
	timer *time.Timer     // ends the grace period; nil while there are users
}

const (
	holdPrefix = "crius-holds-"
	holdGrace  = time.Minute
	ownerName  = "crius.lock" // in the graph root and the imagestore; see package owner
)

func newHolds(store cstorage.Store, locks *durable.Locks, leftovers *durable.Leftovers, owner owners) *holds {
	return &holds{
		store:     store,
		locks:     locks,
		leftovers: leftovers,
		grace:     holdGrace,
		images:    map[string]*hold{},
		owner:     owner,
	}
}

// acquire locks the hold of an image.
func (h *holds) acquire(image string) *hold {
	h.mu.Lock()
	one := h.images[image]
	if one == nil {
		one = &hold{image: image, users: map[string]bool{}}
		h.images[image] = one
	}
	one.owners++
	h.mu.Unlock()
	one.mu.Lock()
	return one
}

func (h *holds) release(one *hold) {
	h.mu.Lock()
	if one.owners--; one.owners == 0 && !one.kept && len(one.users) == 0 {
		delete(h.images, one.image)
	}
	h.mu.Unlock()
	one.mu.Unlock()
}

// use notes that a root file system uses an image, and returns the image's layer directories, top
// first. They stay until drop.
func (h *holds) use(ctx context.Context, image, user string) ([]string, error) {
	if err := h.owned(); err != nil {
		return nil, err
	}
	one := h.acquire(image)
	defer h.release(one)
	if err := h.keep(ctx, one); err != nil {
		return nil, err
	}
	one.users[user] = true
	return one.lower, nil
}

// drop ends a use. After the last one the record stays for the grace period.
func (h *holds) drop(ctx context.Context, image, user string) error {
	if err := h.owned(); err != nil {
		return err
	}
	one := h.acquire(image)
	defer h.release(one)
	delete(one.users, user)
	switch {
	case len(one.users) > 0:
		return nil
	case !one.kept, h.grace == 0:
		return h.free(ctx, one)
	}
	h.stopTimer(one)
	h.expiry.Add(1)
	one.timer = time.AfterFunc(h.grace, func() {
		defer h.expiry.Done()
		ctx := context.WithoutCancel(ctx)
		err := panics.Do(ctx, "delete image reference", func() error { return h.expire(ctx, image) })
		if err != nil {
			slog.Warn("cannot delete the reference of an unused image; the next start retries", "image", image, "err", err)
		}
	})
	return nil
}

// expire ends the grace period of an image.
func (h *holds) expire(ctx context.Context, image string) error {
	one := h.acquire(image)
	defer h.release(one)
	if len(one.users) > 0 || !one.kept {
		return nil
	}
	return h.free(ctx, one)
}

func (h *holds) stopTimer(one *hold) {
	if one.timer != nil && one.timer.Stop() {
		h.expiry.Done()
	}
	one.timer = nil
}

// keep makes the record, unless it exists or a crash has left it. Other tools may delete a record,
// so it checks for one that was made.
func (h *holds) keep(ctx context.Context, one *hold) error {
	h.stopTimer(one)
	if one.kept && !h.lost(one.image) {
		return nil
	}
	if err := h.locks.Await(context.WithoutCancel(ctx), durable.ToWrite); err != nil {
		return err
	}
	record, err := h.store.Image(one.image)
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return fmt.Errorf("image %s is not in the store, pull it again: %w", one.image, fault.NotFound)
	} else if err != nil {
		return err
	}
	if record.ID != one.image { // the library also accepts names and beginnings of ids
		return fmt.Errorf("image %s: not a full id: %w", one.image, fault.Invalid)
	}
	err = h.makeRecord(ctx, one.image)
	lower, lost := durable.UsableLayers(h.store, record.TopLayer)
	if errors.Is(err, cstorage.ErrLayerUnknown) { // of a layer below
		lower, lost = durable.RecordedLayers(h.store, record.TopLayer)
	}
	if lost != nil { // even if the library has not reported it
		err = fmt.Errorf("image %s: %w", one.image, lost)
	}
	one.lower = lower
	switch {
	case err == nil:
		one.kept = true
	case len(one.users) == 0:
		err = errors.Join(err, h.free(ctx, one))
	default: // what there is of the image is in use
	}
	return err
}

// free deletes the record.
func (h *holds) free(ctx context.Context, one *hold) error {
	h.stopTimer(one)
	if err := h.locks.Await(ctx, durable.ToWrite); err != nil {
		return fmt.Errorf("delete reference of image %s: %w", one.image, err)
	}
	err := trace.Call(ctx, "delete image reference", func() error {
		err := h.store.DeleteContainer(holdID(one.image))
		if errors.Is(err, cstorage.ErrNotAContainer) {
			err = h.store.DeleteLayer(holdLayer(one.image)) // on a full disk DeleteContainer may leave the layer
		}
		return err
	})
	if err != nil && !errors.Is(err, cstorage.ErrNotALayer) {
		return fmt.Errorf("delete reference of image %s: %w", one.image, err)
	}
	one.kept, one.lower = false, nil
	return nil
}

// remove deletes an image that no root file system uses, and refuses to delete any other.
func (h *holds) remove(ctx context.Context, image string) error {
	if err := h.owned(); err != nil {
		return err
	}
	if err := h.locks.Await(ctx, durable.ToWrite); err != nil {
		return err
	}
	one := h.acquire(image)
	defer h.release(one)
	record, err := h.store.Image(image)
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return nil
	} else if err != nil {
		return err
	}
	if err := artifact.InUse(image, one.users); err != nil {
		return err
	}
	if !one.kept && h.undecided(image) {
		return fmt.Errorf("image %s: not known yet whether containers use it, retry: %w", image, fault.Unavailable)
	}
	if err := h.free(ctx, one); err != nil {
		return err
	}
	return h.delete(ctx, record)
}

// delete deletes an image and the layers that no other image has.
func (h *holds) delete(ctx context.Context, record *cstorage.Image) error {
	if record.ReadOnly {
		return fmt.Errorf("image %s: it is in a read-only store: %w", record.ID, fault.Precondition)
	}
	job, err := h.leftovers.BeginRemoval(ctx, durable.LayersOf(h.store, record))
	if err != nil && !fault.DiskFull(err) { // on a full disk the removal may help
		return err
	}
	h.leftovers.Removals.Add(1)
	err = trace.Call(ctx, "delete image", func() error { return durable.DeleteImage(h.store, record.ID) })
	h.leftovers.Removals.Add(1)
	// The library stops at a layer that only a read-only store has, when the image's record is
	// gone.
	shared := errors.Is(err, cstorage.ErrLayerUnknown) && !h.ours(record.ID)
	switch {
	case shared, errors.Is(err, cstorage.ErrNotAnImage):
		err = nil
	case errors.Is(err, cstorage.ErrImageUsedByContainer):
		err = fmt.Errorf("image %s: a container of another tool uses it: %w: %w", record.ID, err, fault.Precondition)
	case err != nil:
		err = fmt.Errorf("delete image %s: %w", record.ID, err)
	}
	if job != nil {
		job.End(ctx, !shared && (err == nil || errors.Is(err, fault.Precondition)))
	}
	return err
}

// ours reports whether the writable store has the image.
func (h *holds) ours(image string) bool {
	record, err := h.store.Image(image)
	return err == nil && !record.ReadOnly
}

// undecided reports whether an earlier process has left a record of the image's use, and adopt has
// not yet been told who uses it now.
func (h *holds) undecided(image string) bool {
	h.mu.Lock()
	adopted := h.adopted
	h.mu.Unlock()
	if adopted {
		return false
	}
	_, err := h.store.Container(holdID(image))
	return err == nil
}

// adopt sets the users of all holds: the root file systems of each image.
func (h *holds) adopt(ctx context.Context, users map[string][]string) error {
	if err := h.owned(); err != nil {
		return err
	}
	stale, err := h.records()
	if err != nil { // the next start deletes the records that nobody uses
		stale = map[string]bool{}
	}
	h.mu.Lock()
	for image := range h.images {
		stale[image] = true
	}
	h.mu.Unlock()
	// Wait once for all of them. The records of an earlier server keep the images meanwhile.
	locked := h.locks.Await(ctx, durable.ToWrite)
	err = errors.Join(err, locked)
	for image, ids := range users {
		delete(stale, image)
		h.set(image, ids)
		if locked == nil {
			err = errors.Join(err, h.match(ctx, image))
		}
	}
	for image := range stale {
		h.set(image, nil)
		if locked == nil {
			err = errors.Join(err, h.match(ctx, image))
		}
	}
	h.mu.Lock()
	h.adopted = true
	h.mu.Unlock()
	return err
}

// set makes ids the only users of an image.
func (h *holds) set(image string, ids []string) {
	one := h.acquire(image)
	defer h.release(one)
	clear(one.users)
	for _, id := range ids {
		one.users[id] = true
	}
}

// match makes the record if there are users, and else ends it.
func (h *holds) match(ctx context.Context, image string) error {
	one := h.acquire(image)
	defer h.release(one)
	if len(one.users) == 0 {
		return h.free(ctx, one)
	}
	return h.keep(ctx, one)
}

// close releases the store to another process. It ends all grace periods; if locked is an error,
// records cannot be changed, and the next start ends them.
func (h *holds) close(ctx context.Context, locked error) error {
	h.mu.Lock()
	images := slices.Collect(maps.Keys(h.images))
	h.mu.Unlock()
	err := locked
	for _, image := range images {
		if locked == nil {
			err = errors.Join(err, h.expire(ctx, image))
		} else {
			h.skip(image)
		}
	}
	if h.locks.Lost() == nil { // else timers may hang
		h.expiry.Wait()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	err = errors.Join(err, h.owner.Close())
	h.owner = nil
	return err
}

// skip stops the timer of an image, unless somebody is working on its hold.
func (h *holds) skip(image string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if one := h.images[image]; one != nil && one.mu.TryLock() {
		h.stopTimer(one)
		one.mu.Unlock()
	}
}

// owned returns an error if this process may not change the holds: the store is read-only or
// closed, or another crius has become its owner.
func (h *holds) owned() error {
	h.mu.Lock()
	lock := h.owner
	h.mu.Unlock()
	if lock == nil {
		return fmt.Errorf("image store %s does not belong to this crius instance: %w", h.store.GraphRoot(), fault.Precondition)
	}
	return h.taken()
}

// taken returns an error if another crius has become the owner of the store.
func (h *holds) taken() error {
	h.mu.Lock()
	lock := h.owner
	h.mu.Unlock()
	return lock.Lost()
}
