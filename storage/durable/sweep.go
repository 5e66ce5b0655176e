package durable

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/lockfile"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/internal/tree"
	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/storage/unpack/layerstore"
)

// sweep deletes the layers and incomplete images that jobs have left, and then the jobs. It returns
// the jobs of which something remains.
func (d *Leftovers) sweep(ctx context.Context, jobs []*Job) (left []*Job, err error) {
	if slices.ContainsFunc(jobs, func(j *Job) bool { return !j.settled }) {
		if err := d.sweepLayers(ctx, jobs); err != nil {
			return jobs, err
		}
		handOver(jobs)
	}
	for _, j := range jobs {
		if !j.settled {
			left = append(left, j)
		} else if forgetErr := j.forget(ctx); forgetErr != nil {
			left = append(left, j)
			err = errors.Join(err, forgetErr)
		}
	}
	return left, err
}

// handOver leaves all layers that are kept for running pulls to the oldest failed job, so that such
// jobs do not accumulate. If the process dies, the directory of that job makes the next process
// check all layers that were made since then.
func handOver(jobs []*Job) {
	var oldest *Job
	pulls := slices.DeleteFunc(slices.Clone(jobs), func(j *Job) bool { return j.settled || j.removal })
	for _, j := range pulls {
		if oldest == nil || j.start.Before(oldest.start) {
			oldest = j
		}
	}
	for _, j := range pulls {
		if j != oldest {
			oldest.layers = append(oldest.layers, j.layers...)
			j.layers, j.settled = nil, true
		}
	}
}

// sweepLayers deletes the layers that unsettled jobs have left in the store, and settles jobs
// without any.
func (d *Leftovers) sweepLayers(ctx context.Context, jobs []*Job) error {
	if err := d.locks.Await(ctx, ToWrite); err != nil {
		return err
	}
	jobs = slices.DeleteFunc(slices.Clone(jobs), func(j *Job) bool { return j.settled })
	if slices.ContainsFunc(jobs, func(j *Job) bool { return !j.swept }) {
		if err := d.sweepRest(ctx, jobs); err != nil {
			return err
		}
	}
	orphans, wanted, err := d.orphans()
	if err != nil {
		return err
	}
	for _, layer := range orphans {
		if !slices.ContainsFunc(jobs, func(j *Job) bool { return j.left(layer) }) {
			continue
		}
		deleteErr := trace.Call(ctx, "delete layer", func() error { return d.store.DeleteLayer(layer.ID) })
		if deleteErr != nil && !needed(deleteErr) {
			err = errors.Join(err, fmt.Errorf("delete layer %s: %w", layer.ID, deleteErr))
		}
	}
	if err != nil {
		return err
	}
	for _, j := range jobs {
		var kept []string
		for _, layer := range wanted {
			if j.left(layer) {
				kept = append(kept, layer.ID)
			}
		}
		j.layers, j.swept, j.settled = kept, true, len(kept) == 0
	}
	return nil
}

// left reports whether a layer without an image may be a leftover of the job.
func (j *Job) left(layer cstorage.Layer) bool {
	return !j.swept && !layer.Created.Before(j.start) || slices.Contains(j.layers, layer.ID)
}

// sweepRest deletes the other leftovers of jobs, at their first sweep, since no pull can need them.
func (d *Leftovers) sweepRest(ctx context.Context, jobs []*Job) error {
	if err := trace.Do(ctx, "sweep staging directories", func(context.Context) error {
		return errors.Join(d.sweepStaging(), d.sweepUnpacked(), d.sweepStaged("staging", "*"))
	}); err != nil {
		return err
	}
	for _, j := range jobs {
		if j.swept || j.image == "" || d.pulls(j.image) { // a running pull deletes its incomplete image itself
			continue
		}
		if err := d.sweepHalf(ctx, j.image); err != nil {
			return err
		}
	}
	return trace.Call(ctx, "delete orphaned image data", d.sweepImages)
}

// pulls reports whether the image is being pulled.
func (d *Leftovers) pulls(image string) bool {
	return slices.ContainsFunc(d.running, func(j *Job) bool { return !j.removal && j.image == image })
}

// sweepStaging makes the library delete the directories in which dead workers were unpacking: it
// does so whenever it reads layer records that others may have written.
func (d *Leftovers) sweepStaging() error {
	lock, err := lockfile.GetLockFile(filepath.Join(d.store.GraphRoot(), d.store.GraphDriverName()+"-layers", "layers.lock"))
	if err != nil {
		return err
	}
	lock.Lock()
	_, err = lock.RecordWrite()
	lock.Unlock()
	return err
}

// sweepUnpacked deletes the directories into which dead workers unpacked layers.
func (d *Leftovers) sweepUnpacked() error {
	return d.sweepStaged(layerstore.StagingPlace, layerstore.StagingPrefix+"*")
}

// sweepStaged deletes directories with layers that nobody will add. The library's are in "staging", where earlier
// versions unpacked, too. A directory in use is locked.
func (d *Leftovers) sweepStaged(place, pattern string) error {
	found, err := filepath.Glob(filepath.Join(RootsOf(d.store).ForImages(), d.store.GraphDriverName(), place, pattern))
	for _, dir := range found {
		if used, lookErr := inUse(dir); lookErr != nil {
			err = errors.Join(err, lookErr)
		} else if !used {
			err = errors.Join(err, tree.Remove(dir))
		}
	}
	return err
}

// inUse reports whether a worker may need a staging directory. It deletes one in which nothing has
// been unpacked and which is not locked: a worker that has just made it makes another. What is no
// directory, such as a link, no worker has made: it is left alone.
func inUse(dir string) (bool, error) {
	if st, err := os.Lstat(dir); err == nil && !st.IsDir() {
		return true, nil
	}
	lock, files := filepath.Join(dir, layers.StagingLock), filepath.Join(dir, "dir")
	used, err := locked(lock)
	if !errors.Is(err, fs.ErrNotExist) {
		return used, err
	}
	_, _ = os.Remove(files), os.Remove(dir) // if they are empty
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	used, err = locked(lock) // it is no longer being made
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return used, err
}

// locked reports whether another process has a lock on a file. It opens nothing but a regular file: to open
// a named pipe waits for its other end, and a worker may replace the file at any time.
func locked(file string) (bool, error) {
	f, err := regular.Open(file)
	if errors.Is(err, fault.Invalid) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil {
		return false, &os.PathError{Op: "query lock", Path: file, Err: err}
	}
	return lock.Type != unix.F_UNLCK, nil
}

// sweepHalf deletes an image without a manifest, which nobody would list or remove: the library
// makes its record first, which may have its name already, and then adds config and manifest.
func (d *Leftovers) sweepHalf(ctx context.Context, id string) error {
	image, err := d.store.Image(id)
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return nil
	}
	if err != nil {
		return err
	}
	if image.ID != id || image.ReadOnly || !NeverWhole(image) {
		return nil
	}
	err = trace.Call(ctx, "delete incomplete image", func() error { return DeleteImage(d.store, id) })
	if err != nil && !errors.Is(err, cstorage.ErrNotAnImage) {
		return fmt.Errorf("delete incomplete image %s: %w", id, err)
	}
	return nil
}

// sweepImages deletes the manifests and configs of images without a record: the library deletes the
// record first. It also makes the record first, so files that existed before the records are read
// either have a record or never will. The exception is an image that is pulled again meanwhile,
// maybe by a pull that does not know its id.
func (d *Leftovers) sweepImages() error {
	if d.pulls("") {
		return nil
	}
	if aside, err := RootsOf(d.store).DamagedRecords(); err != nil || len(aside) > 0 {
		return err
	}
	var found []string
	for _, root := range RootsOf(d.store).All() {
		dir := filepath.Join(root, d.store.GraphDriverName()+"-images")
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, entry := range entries {
			if entry.IsDir() && len(entry.Name()) == sha256.Size*2 {
				found = append(found, filepath.Join(dir, entry.Name()))
			}
		}
	}
	images, err := d.store.Images()
	if err != nil {
		return err
	}
	for _, dir := range found {
		id := filepath.Base(dir)
		recorded := slices.ContainsFunc(images, func(i cstorage.Image) bool { return i.ID == id })
		if !recorded && !d.pulls(id) {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}
	return err
}

// sweepWrites deletes the files that the library was writing when its process died or the power
// failed. The library writes them under a lock, so with that lock nobody is writing. If somebody
// keeps the lock for too long, it returns an error.
func (d *Leftovers) sweepWrites(ctx context.Context) error {
	var errs []error
	for _, file := range RootsOf(d.store).records() {
		dir := filepath.Dir(file.path)
		if len(halfWritten(dir)) == 0 {
			continue
		}
		if err := d.locks.Await(ctx, ToWrite); err != nil {
			return errors.Join(append(errs, err)...)
		}
		kind := strings.TrimSuffix(filepath.Base(file.path), ".json")
		lock, err := lockfile.GetLockFile(filepath.Join(dir, kind+".lock"))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		lock.Lock()
		for _, file := range halfWritten(dir) {
			errs = append(errs, os.Remove(file))
		}
		lock.Unlock()
	}
	return errors.Join(errs...)
}

// halfWritten returns the files in a directory of records, and in the directories below it, that
// have the name of an incomplete file.
func halfWritten(dir string) []string {
	const pattern = ".tmp-*"
	here, _ := filepath.Glob(filepath.Join(dir, pattern)) // the pattern is valid
	below, _ := filepath.Glob(filepath.Join(dir, "*", pattern))
	return append(here, below...)
}

// needed reports whether somebody has begun to use the layer, or it is already gone.
func needed(err error) bool {
	for _, reason := range []error{
		cstorage.ErrLayerHasChildren, cstorage.ErrLayerUsedByImage, cstorage.ErrLayerUsedByContainer,
		cstorage.ErrNotALayer, cstorage.ErrLayerUnknown,
	} {
		if errors.Is(err, reason) {
			return true
		}
	}
	return false
}

// orphans returns the layers that no image and no container needs, children before their parents.
// Layers that a running pull may need are in wanted. While records are moved aside nobody knows, so
// it returns none.
func (d *Leftovers) orphans() (orphans, wanted []cstorage.Layer, err error) {
	if aside, err := RootsOf(d.store).DamagedRecords(); err != nil || len(aside) > 0 {
		return nil, nil, err
	}
	all, err := d.store.MultiList(cstorage.MultiListOptions{Layers: true, Images: true, Containers: true})
	if err != nil {
		return nil, nil, err
	}
	byID := map[string]*cstorage.Layer{}
	for i := range all.Layers {
		byID[all.Layers[i].ID] = &all.Layers[i]
	}
	mark := func(marked map[string]bool, id string) {
		for id != "" && !marked[id] {
			marked[id] = true
			if layer := byID[id]; layer != nil {
				id = layer.Parent
			} else {
				id = ""
			}
		}
	}
	used, kept := map[string]bool{}, map[string]bool{}
	for _, image := range all.Images {
		mark(used, image.TopLayer)
		for _, id := range image.MappedTopLayers {
			mark(used, id)
		}
	}
	for _, container := range all.Containers {
		mark(used, container.LayerID)
	}
	depth := func(layer cstorage.Layer) (n int) {
		for l := byID[layer.Parent]; l != nil && n < len(byID); l = byID[l.Parent] {
			n++
		}
		return n
	}
	for _, j := range d.running {
		for _, id := range j.needs.Layers {
			mark(kept, id)
		}
	}
	slices.SortStableFunc(all.Layers, func(a, b cstorage.Layer) int { return depth(a) - depth(b) })
	d.keepSources(all.Layers, used, kept)
	for _, layer := range all.Layers {
		switch {
		case used[layer.ID] || layer.ReadOnly:
		case kept[layer.ID]:
			wanted = append(wanted, layer)
		default:
			orphans = append(orphans, layer)
		}
	}
	slices.Reverse(orphans)
	return orphans, wanted, nil
}

// keepSources adds to kept the layers from which running pulls may copy: one layer of each content
// that no other layer in used or kept has, if all layers below it are in used or kept. So failed
// pulls leave no more than the running pulls could have brought themselves. A pull that was about
// to copy from another layer is repeated, as is a pull that knows its layers only as blobs and has
// found the content of another blob. Parents come before children in all.
func (d *Leftovers) keepSources(all []cstorage.Layer, used, kept map[string]bool) {
	wanted := map[digest.Digest]bool{}
	for _, j := range d.running {
		for _, one := range j.needs.Digests {
			wanted[one] = true
		}
	}
	delete(wanted, "") // layers whose digest is unknown
	contents := map[digest.Digest]bool{}
	stays := func(id string) bool { return id == "" || used[id] || kept[id] }
	content := func(l cstorage.Layer) digest.Digest { return cmp.Or(l.UncompressedDigest, l.CompressedDigest) }
	for _, layer := range all {
		if stays(layer.ID) {
			contents[content(layer)] = true
		}
	}
	for _, layer := range all {
		one := wanted[layer.CompressedDigest] || wanted[layer.UncompressedDigest]
		if one && !contents[content(layer)] && stays(layer.Parent) {
			kept[layer.ID], contents[content(layer)] = true, true
		}
	}
}
