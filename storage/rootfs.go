package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/internal/tree"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/overlay"
	"github.com/crius-run/crius/storage/quota"
)

// Rootfs is a container's root file system: the layers of an image below, a writable layer on top.
// Without the writable layer it is an image volume.
type Rootfs struct {
	ID         string // of the container; of a volume followed by "-" and more
	ImageID    string // whole, as in Image.ID; of an artifact only if ReadOnly
	Dir        string // directory in which the writable layer is made
	Target     string // mount point; made if it is missing
	ReadOnly   bool   // no writable layer
	MountLabel string // SELinux context of every file; may be empty
	// UserNS is the path of the user namespace whose ids own the files: root in the namespace owns
	// the image's files of root. Empty: the node's.
	UserNS string
	// WritableSize is how many bytes the writable layer may have; 0: what the configuration says.
	WritableSize int64
}

// Names of a writable layer within Rootfs.Dir.
const (
	upperName = "upper"
	workName  = "work"
	emptyName = "empty" // lower directories where the image has too few
)

// Upper returns the directory with what the container has changed of its root file system.
func (r Rootfs) Upper() string { return filepath.Join(r.Dir, upperName) }

// IsWritableLayer reports whether a directory in Rootfs.Dir has files that the container has
// written.
func IsWritableLayer(name string) bool { return name == upperName || name == workName }

// MountRootfs mounts a root file system. It leaves one that is mounted as it is, and mounts one
// whose writable layer exists with that layer. From the call on, even if it fails, the image has a
// reference until RemoveRootfs.
//
// The error is fault.NotFound if the image does not exist, fault.Exhausted if the disk is full, and
// fault.Precondition if the file system cannot limit the writable layer to WritableSize.
func (s *Store) MountRootfs(ctx context.Context, r Rootfs) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if r.ID == "" || !filepath.IsAbs(r.Dir) || !filepath.IsAbs(r.Target) {
		return fmt.Errorf("mount rootfs %s: id or absolute paths are missing: %w", r.ID, fault.Invalid)
	}
	lower, err := s.artifacts.use(ctx, r)
	if err == nil {
		err = trace.Call(ctx, "mount layers", func() error { return r.mount(lower, s.mountOptions, s.projectsOf(r)) })
		if err != nil && slices.ContainsFunc(lower, isGone) { // after use has checked them
			err = fmt.Errorf("%w: %w", durable.ErrLayersLost, err)
		}
	}
	if errors.Is(err, durable.ErrLayersLost) {
		s.images.forget(r.ImageID) // so that the kubelet sees that it is gone, and pulls it again
		s.puller.Forget(r.ImageID) // or that pull would call it up to date
		err = fmt.Errorf("%w: %w", err, fault.NotFound)
	}
	if fault.DiskFull(err) {
		err = fmt.Errorf("%w: %w", err, fault.Exhausted)
	}
	if err != nil {
		return fmt.Errorf("mount rootfs %s: %w", r.ID, err)
	}
	if _, known := s.usage.of(r.ID); !known {
		_, _ = s.RootfsUsage(r) // to cache the usage of a new layer, which is one directory
	}
	return nil
}

// projectsOf returns the projects with the limits of the root file system's writable layer.
func (s *Store) projectsOf(r Rootfs) *quota.Projects {
	limits := s.cfg.limits(s.now())
	if r.WritableSize > 0 {
		limits.Bytes = uint64(r.WritableSize)
	}
	return s.projects.With(limits)
}

func isGone(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

func (r Rootfs) mount(lower, options []string, projects *quota.Projects) error {
	if err := os.MkdirAll(r.Target, 0o700); err != nil {
		return err
	}
	if done, err := overlay.Mounted(r.Target); done || err != nil {
		return err
	}
	m := overlay.Mount{Lower: lower, Target: r.Target, Label: r.MountLabel, Options: options, UserNS: r.UserNS}
	least := 2 // overlay needs two if nothing is writable
	if !r.ReadOnly {
		least = 1
		m.Upper, m.Work = filepath.Join(r.Dir, upperName), filepath.Join(r.Dir, workName)
		m.Made = func() error { return projects.Bound(m.Upper, m.Work, r.UserNS != "") }
		// The limits of the configuration were checked when it was read.
		if r.WritableSize > 0 {
			if err := projects.Check(); err != nil {
				return err
			}
		}
	}
	for len(m.Lower) < least {
		empty := filepath.Join(r.Dir, emptyName, strconv.Itoa(len(m.Lower)))
		if err := os.MkdirAll(empty, 0o755); err != nil {
			return err
		}
		m.Lower = append(slices.Clip(m.Lower), empty)
	}
	return m.Make()
}

// UnmountRootfs unmounts a root file system, and keeps its writable layer. If it is not mounted,
// UnmountRootfs succeeds.
func (s *Store) UnmountRootfs(r Rootfs) error {
	for range 16 { // something may have been mounted on top
		is, err := overlay.Mounted(r.Target)
		if err != nil {
			return fmt.Errorf("unmount rootfs %s: %w", r.ID, err)
		}
		if !is {
			return nil
		}
		err = unix.Unmount(r.Target, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			slog.Warn("root file system busy, unmounted lazily", "container", r.ID, "path", r.Target)
			err = unix.Unmount(r.Target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount rootfs %s: %w", r.ID, &os.PathError{Op: "unmount", Path: r.Target, Err: err})
		}
	}
	return fmt.Errorf("unmount rootfs %s: %s stays mounted: %w", r.ID, r.Target, fault.Unavailable)
}

// RemoveRootfs unmounts a root file system, deletes its writable layer and ends its use of the
// image. It may be repeated, even after it has failed half-way.
func (s *Store) RemoveRootfs(ctx context.Context, r Rootfs) error {
	if err := trace.Call(ctx, "unmount layers", func() error { return s.UnmountRootfs(r) }); err != nil {
		return err
	}
	err := trace.Call(ctx, "delete writable layer", func() error {
		return s.projects.Remove(filepath.Join(r.Dir, workName), r.removeWritable)
	})
	if err != nil {
		return fmt.Errorf("remove rootfs %s: %w", r.ID, err)
	}
	s.usage.forget(r.ID)
	if r.ImageID == "" {
		return nil
	}
	if err := s.artifacts.drop(ctx, r); err != nil {
		return fmt.Errorf("remove rootfs %s: %w", r.ID, err)
	}
	return nil
}

func (r Rootfs) removeWritable() error {
	for _, name := range []string{upperName, emptyName, workName} { // the last has the project
		if err := tree.Remove(filepath.Join(r.Dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// Adopt is called after a restart with ID, ImageID and ReadOnly of all root file systems that
// exist: from now on exactly these use images. It deletes the references of all other images. A
// missing image is an error, but the others are adopted nevertheless.
func (s *Store) Adopt(ctx context.Context, rs []Rootfs) error {
	users, artifactUsers := map[string][]string{}, map[string][]string{}
	for _, r := range rs {
		of := users
		if s.artifacts.mounts(r) {
			of = artifactUsers
		}
		of[r.ImageID] = append(of[r.ImageID], r.ID)
	}
	s.artifacts.Adopt(ctx, artifactUsers)
	if err := s.holds.adopt(ctx, users); err != nil {
		return fmt.Errorf("restore image references: %w", err)
	}
	return nil
}
