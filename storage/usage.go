package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/tree"
	"github.com/crius-run/crius/storage/durable"
)

// FsUsage is what something occupies on a file system.
type FsUsage struct {
	Mountpoint string // a path on the file system (CRI FilesystemIdentifier)
	UsedBytes  uint64
	InodesUsed uint64
	Timestamp  time.Time
}

// FsInfo is the usage of the file systems of images and of containers'
// writable layers. It walks no directory tree, and waits for no other tool.
//
// Images: UsedBytes is the size of all artifacts, and of all layers as
// containers/storage recorded them when it unpacked them, those of other tools
// included and those of read-only stores not, each counted once; that is what removing images can free. It keeps no
// count of files, so that InodesUsed is that of the whole file system.
//
// Containers: both are sums over the containers' latest RootfsUsage. Those that
// are older than usageAge are measured anew meanwhile, for whoever asks next.
func (s *Store) FsInfo(ctx context.Context) (images, containers FsUsage, err error) {
	now := time.Now()
	images = FsUsage{Mountpoint: s.roots.ForImages(), Timestamp: now}
	if images.UsedBytes, err = s.imagesSize(); err != nil {
		return images, containers, fmt.Errorf("image file system: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(images.Mountpoint, &st); err != nil {
		return images, containers, fmt.Errorf("image file system: %w", &os.PathError{Op: "statfs", Path: images.Mountpoint, Err: err})
	}
	images.InodesUsed = st.Files - st.Ffree
	s.refreshUsage(ctx)
	containers = s.usage.sum()
	containers.Mountpoint = s.containersDir
	containers.Timestamp = now
	return images, containers, nil
}

// Sizes are the bytes that images and writable layers have, as FsInfo says. Nothing is
// measured for it: those of writable layers are as old as the last question of FsInfo.
func (s *Store) Sizes() (images, writable uint64, err error) {
	images, err = s.imagesSize()
	return images, s.usage.sum().UsedBytes, err
}

// imagesSize returns the bytes of all layers and artifacts.
func (s *Store) imagesSize() (uint64, error) {
	layers, err := layersSize(s.store, s.locks)
	return layers + s.artifacts.Size(), err
}

// layersSize returns the bytes of all layers. While another process holds a lock, it takes them
// from the record file, which the library replaces as a whole and so can be read at any time.
func layersSize(store cstorage.Store, locks *durable.Locks) (total uint64, err error) {
	var layers []cstorage.Layer
	if locks.Held(durable.ToRead) == nil {
		layers, err = store.Layers()
	} else {
		layers, err = durable.RootsOf(store).RecordedLayers()
	}
	for _, layer := range layers {
		if !layer.ReadOnly { // of a store that is not ours
			total += uint64(max(layer.UncompressedSize, 0))
		}
	}
	return total, err
}

// WritableUsage is the latest RootfsUsage of a container, which may be as old as
// usageAge and the time that measuring takes; ok is false if there is none yet.
// Nothing is measured while the caller waits.
func (s *Store) WritableUsage(ctx context.Context, id string) (usage FsUsage, ok bool) {
	s.refreshUsage(ctx)
	return s.usage.of(id)
}

const (
	// usageAge is how old the usage of the writable layers may be.
	usageAge = 10 * time.Second
	// usageRest is how long nothing is measured afterwards, as a multiple of
	// the time that it took: millions of files are looked at less often. It is
	// no longer than usageRestMax, or a disk that hung for a while would hide
	// from kubelets who fills it.
	usageRest    = 20
	usageRestMax = 2 * time.Minute
)

// refreshUsage measures the writable layers in the background, unless that was
// done a short while ago or is being done. Close waits for it.
func (s *Store) refreshUsage(ctx context.Context) {
	if !s.usage.begin() {
		return
	}
	s.background.Go(func() { panics.Run(context.WithoutCancel(ctx), "measure writable layers", s.measureAll) })
}

func (s *Store) measureAll() {
	began := time.Now()
	defer func() { s.usage.end(began) }()
	layers, err := os.ReadDir(s.containersDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		slog.Warn("cannot measure writable layers", "err", err)
	}
	for _, layer := range layers {
		r := Rootfs{ID: layer.Name(), Dir: filepath.Join(s.containersDir, layer.Name())}
		usage, err := s.RootfsUsage(r)
		switch {
		case errors.Is(err, tree.ErrStopped):
			return
		case err != nil: // what is known of it is better than nothing
			slog.Warn("cannot measure writable layer", "container", r.ID, "err", err)
			s.usage.keep(r.ID, usage)
		case usage.InodesUsed == 0: // removed meanwhile
			s.usage.forget(r.ID)
		}
	}
}

// RootfsUsage measures a writable layer: every file in it, hard links once, or what its
// file system has counted where that can be relied on (quota.Projects). Files may come and
// go meanwhile. A layer that is gone occupies nothing. With an error it is what has been
// counted until then.
func (s *Store) RootfsUsage(r Rootfs) (FsUsage, error) {
	upper := filepath.Join(r.Dir, upperName)
	measured := tree.Usage{Stop: s.usage.stopping}
	var err error
	if counted, ok := s.projects.Usage(filepath.Join(r.Dir, workName)); ok {
		measured.Bytes, measured.Inodes = counted.Bytes, counted.Inodes
	} else {
		err = measured.Add(upper)
	}
	usage := FsUsage{Mountpoint: s.containersDir, UsedBytes: measured.Bytes, InodesUsed: measured.Inodes, Timestamp: time.Now()}
	if err != nil {
		return usage, fmt.Errorf("usage of rootfs %s: %w", r.ID, err)
	}
	s.usage.note(r.ID, usage)
	return usage, nil
}

// usageCache keeps the latest usage of each writable layer.
type usageCache struct {
	mu        sync.Mutex
	latest    map[string]FsUsage
	measuring bool
	next      time.Time // when it is time to measure all
	closed    atomic.Bool
}

// stopping tells whoever measures to leave off.
func (c *usageCache) stopping() bool { return c.closed.Load() }

// keep notes what was counted of a layer that could not be measured to the end, unless
// it was larger the last time: a container must not be able to hide what it has.
func (c *usageCache) keep(id string, counted FsUsage) {
	last, _ := c.of(id)
	counted.UsedBytes = max(last.UsedBytes, counted.UsedBytes)
	counted.InodesUsed = max(last.InodesUsed, counted.InodesUsed)
	counted.Timestamp = time.Now()
	c.note(id, counted)
}

// begin reports whether it is time to measure all, and nobody does.
func (c *usageCache) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.measuring || time.Now().Before(c.next) {
		return false
	}
	c.measuring = true
	return true
}

// end ends the measurement that began at that time, and forgets layers not measured
// since: they were being removed during the previous measurement.
func (c *usageCache) end(began time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	rest := min(usageRestMax, usageRest*time.Since(began))
	c.measuring, c.next = false, time.Now().Add(max(usageAge, rest))
	maps.DeleteFunc(c.latest, func(_ string, u FsUsage) bool { return u.Timestamp.Before(began) })
}

func (c *usageCache) of(id string) (FsUsage, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	usage, ok := c.latest[id]
	return usage, ok
}

func (c *usageCache) note(id string, usage FsUsage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.latest == nil {
		c.latest = map[string]FsUsage{}
	}
	c.latest[id] = usage
}

func (c *usageCache) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.latest, id)
}

func (c *usageCache) sum() (total FsUsage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, usage := range c.latest {
		total.UsedBytes += usage.UsedBytes
		total.InodesUsed += usage.InodesUsed
	}
	return total
}
