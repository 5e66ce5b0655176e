package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// roots are the file systems of a container: its root file system, its image volumes, which
// storage knows as read-only root file systems, and its copies of the node's files.
type roots struct {
	images  Images
	own     storage.Rootfs
	volumes []records.Volume
	bundle  string // directory
}

func (r *roots) all() []storage.Rootfs {
	all := []storage.Rootfs{r.own}
	for _, v := range r.volumes {
		all = append(all, r.volume(v))
	}
	return all
}

func (r *roots) volume(v records.Volume) storage.Rootfs {
	name, volume := strconv.Itoa(v.Mount), r.own
	volume.ID, volume.ImageID, volume.ReadOnly = v.RootID(r.own.ID), v.ImageID, true
	volume.Dir = filepath.Join(r.own.Dir, "volumes", name)
	volume.Target = filepath.Join(r.bundle, "volumes", name)
	return volume
}

// copies returns where the copies of the node's files are mounted.
func (r *roots) copies() string { return filepath.Join(r.bundle, "copies") }

// devices returns where the device nodes of a container in a user namespace are.
func (r *roots) devices() string { return filepath.Join(r.bundle, "devices") }

func (r *roots) remove(ctx context.Context) error {
	if err := errors.Join(mount.Unmount(r.copies()), mount.Unmount(r.devices())); err != nil {
		return err
	}
	for _, root := range r.all() {
		if err := r.images.RemoveRootfs(ctx, root); err != nil {
			return err
		}
	}
	return nil
}

// mount mounts the root file system and the image volumes. It returns the path of each image
// volume, or of the part of it that was requested, parallel to the request's mounts, as
// spec.Facts wants it.
func (r *roots) mount(ctx context.Context, mounts []*cri.Mount) ([]string, error) {
	if err := r.images.MountRootfs(ctx, r.own); err != nil {
		return nil, fmt.Errorf("mount root file system: %w", err)
	}
	sources := make([]string, len(mounts))
	for _, v := range r.volumes {
		at, volume := mounts[v.Mount].GetContainerPath(), r.volume(v)
		if err := r.images.MountRootfs(ctx, volume); err != nil {
			return nil, fmt.Errorf("%w at %s: %w", ErrImageVolume, at, err)
		}
		path, err := spec.ResolveBelow(volume.Target, cmp.Or(mounts[v.Mount].GetImageSubPath(), "."))
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", err, fault.NotFound)
		}
		if err != nil {
			return nil, fmt.Errorf("%w at %s: image_sub_path: %w", ErrImageVolume, at, err)
		}
		sources[v.Mount] = path
	}
	return sources, nil
}

// ErrImageVolume says that a container was not created because one of its image volumes could
// not be used.
var ErrImageVolume = errors.New("image volume")
