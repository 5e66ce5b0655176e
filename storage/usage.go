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

	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/tree"
	"github.com/crius-run/crius/storage/diskusage"
)

// FsUsage is the usage of a file system.
type FsUsage struct {
	Mountpoint string // a path on the file system (CRI FilesystemIdentifier)
	UsedBytes  uint64
	InodesUsed uint64
	Timestamp  time.Time
}

// FsInfo returns the usage of the file systems of images and of writable layers, in blocks of the disk. It
// waits for no other tool.
//
// Images: all that the store has for images and artifacts, other tools' included: layers, each once,
// their records, downloads, and layers that are being unpacked. Read-only stores and the reserve do not
// count. Layers are those of now; what is beside them, and layers that another tool has added, may be as
// old as the usage of the containers.
//
// Containers: sums over the containers' latest RootfsUsage. If that is older than usageAge, containers
// and images are measured in the background, for the next call.
func (s *Store) FsInfo(ctx context.Context) (images, containers FsUsage, err error) {
	now := time.Now()
	used, err := s.imagesUsage()
	if err != nil {
		return images, containers, fmt.Errorf("image file system: %w", err)
	}
	images = FsUsage{Mountpoint: s.roots.ForImages(), UsedBytes: used.Bytes, InodesUsed: used.Inodes, Timestamp: now}
	s.refreshUsage(ctx)
	containers = s.usage.sum()
	containers.Mountpoint = s.containersDir
	containers.Timestamp = now
	return images, containers, nil
}

// Sizes returns the bytes of images and writable layers, as in FsInfo. It measures nothing again: the
// bytes of writable layers are those of the last FsInfo.
func (s *Store) Sizes() (images, writable uint64, err error) {
	used, err := s.imagesUsage()
	return used.Bytes, s.usage.sum().UsedBytes, err
}

// imagesUsage returns what images and artifacts take of the disk.
func (s *Store) imagesUsage() (diskusage.Usage, error) {
	images, err := s.imageUsage.sum()
	return images.Plus(s.artifacts.Usage()), err
}

// WritableUsage returns the latest RootfsUsage of a container. Its age is at most usageAge and the
// time of measuring; ok is false if there is none yet. It does not wait for measuring.
func (s *Store) WritableUsage(ctx context.Context, id string) (usage FsUsage, ok bool) {
	s.refreshUsage(ctx)
	return s.usage.of(id)
}

const (
	// usageAge is the maximum age of the usage of writable layers.
	usageAge = 10 * time.Second
	// usageRest is how long nothing is measured afterwards, as a multiple of the time that
	// measuring took: millions of files are counted less often. It is at most usageRestMax:
	// otherwise a disk that hung for a while would hide from kubelets which container fills it.
	usageRest    = 20
	usageRestMax = 2 * time.Minute
)

// refreshUsage measures the writable layers and the images in the background, unless that was done a
// short while ago or is in progress. Close waits for it.
func (s *Store) refreshUsage(ctx context.Context) {
	if !s.usage.begin() {
		return
	}
	s.background.Go(func() { panics.Run(context.WithoutCancel(ctx), "measure disk usage", s.measureAll) })
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
	if err := s.imageUsage.measure(); err != nil && !errors.Is(err, tree.ErrStopped) {
		slog.Warn("cannot measure all of the image store", "err", err)
	}
}

// RootfsUsage measures a writable layer. It counts every file, hard links once, or takes the count
// of the file system if that is reliable (quota.Projects). Files may come and go meanwhile. A layer
// that does not exist has no usage. With an error it returns what has been counted so far.
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

// usageCache caches the latest usage of each writable layer.
type usageCache struct {
	mu        sync.Mutex
	latest    map[string]FsUsage
	measuring bool
	next      time.Time // when all must be measured again
	closed    atomic.Bool
}

// stopping reports whether measuring must stop.
func (c *usageCache) stopping() bool { return c.closed.Load() }

// keep caches the count of a layer that could not be measured to the end, unless the last one was
// larger: a container must not be able to hide its usage.
func (c *usageCache) keep(id string, counted FsUsage) {
	last, _ := c.of(id)
	counted.UsedBytes = max(last.UsedBytes, counted.UsedBytes)
	counted.InodesUsed = max(last.InodesUsed, counted.InodesUsed)
	counted.Timestamp = time.Now()
	c.note(id, counted)
}

// begin reports whether all must be measured now, and nobody does so yet.
func (c *usageCache) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.measuring || time.Now().Before(c.next) {
		return false
	}
	c.measuring = true
	return true
}

// end ends the measurement that began at that time, and removes layers that have not been measured
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
