package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/mountsconf"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// ErrImageVolume is a container that was not created for want of one of its
// image volumes.
var ErrImageVolume = errors.New("image volume")

// planVolumes finds the images that a container mounts. They were pulled
// before, as the container's own (CRI: Mount.image).
func planVolumes(ctx context.Context, images Images, pod *cri.PodSandboxConfig, mounts []*cri.Mount) ([]records.Volume, error) {
	var volumes []records.Volume
	for i, m := range mounts {
		if m.GetImage() == nil {
			continue
		}
		image, err := admitImage(ctx, images, pod, m.GetImage())
		if err != nil {
			return nil, fmt.Errorf("%w at %s: %w", ErrImageVolume, m.GetContainerPath(), err)
		}
		volumes = append(volumes, records.Volume{Mount: i, ImageID: image.ID})
	}
	return volumes, nil
}

// admitImage finds an image that was pulled before and asks the signature policy of
// the pod's namespace about it, for another namespace may have pulled it.
func admitImage(ctx context.Context, images Images, pod *cri.PodSandboxConfig, asked *cri.ImageSpec) (*storage.Image, error) {
	image, err := images.Image(ctx, asked.GetImage())
	if err == nil {
		err = images.Admit(ctx, storage.Use{
			ImageID:   image.ID,
			Name:      cmp.Or(asked.GetUserSpecifiedImage(), asked.GetImage()),
			Namespace: pod.GetMetadata().GetNamespace(),
		})
	}
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", asked.GetImage(), err)
	}
	return image, nil
}

// roots are the file systems of a container: its root file system, its image volumes,
// which storage knows as root file systems that nobody writes to, and its copies of the
// node's files.
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

// copies is where the copies of the node's files are mounted.
func (r *roots) copies() string { return filepath.Join(r.bundle, "copies") }

func (r *roots) remove(ctx context.Context) error {
	if err := mount.Unmount(r.copies()); err != nil {
		return err
	}
	for _, root := range r.all() {
		if err := r.images.RemoveRootfs(ctx, root); err != nil {
			return err
		}
	}
	return nil
}

// mount mounts them, and returns where each image volume, or the part of
// it that was asked for, has become visible: parallel to the request's mounts,
// as spec.Facts wants it.
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

// makeVolumes makes the directories that the image declares as its volumes
// (docs/decisions/0027-image-volumes.md), and returns those that are mounted.
func (c *Container) makeVolumes(ctx context.Context, in spec.Input) ([]string, error) {
	mode := c.engine.cfg.ImageVolumes
	if mode != "mkdir" && mode != "bind" {
		return nil, nil
	}
	volumes, ignored, err := spec.MakeVolumes(&in)
	if diskFull := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT); diskFull {
		err = fmt.Errorf("%w: %w", err, fault.Exhausted)
	}
	if err != nil {
		return nil, err
	}
	if len(ignored) > 0 {
		slog.WarnContext(ctx, "volumes of the image ignored", "container", c.ID, "image", c.plan.ImageID, "volumes", len(ignored), "first", ignored[0])
	}
	if mode != "bind" {
		return nil, nil
	}
	return volumes, nil
}

// copyNodeFiles gives the container its copies of what the node's mounts.conf lists.
func (c *Container) copyNodeFiles(ctx context.Context, asked annotation.Asked) (mounts []*cri.Mount, err error) {
	set, problems := mountsconf.Read(c.engine.cfg.MountsFiles, mountsconf.FIPSFile)
	if asked.DisableFIPS {
		set = set.WithoutFIPS()
	}
	if !set.Empty() {
		err = trace.Call(ctx, "copy node files", func() error {
			dir := c.roots.copies()
			if err := errors.Join(mount.Copies(dir, c.plan.MountLabel), c.sandbox.files.LetIn(dir)); err != nil {
				return err
			}
			uid, gid := c.sandbox.plan.Namespaces.Root()
			var skipped []error
			mounts, skipped, err = set.Copy(dir, c.ref.Rootfs(), uid, gid)
			problems = append(problems, skipped...)
			return err
		})
	}
	if len(problems) > 0 {
		slog.WarnContext(ctx, "container lacks files that mounts.conf lists", "container", c.ID, "missing", len(problems), "err", problems[0])
	}
	if err != nil {
		return nil, fmt.Errorf("copy what mounts.conf lists: %w", err)
	}
	return mounts, spec.CheckRootfs(c.ref.Rootfs(), mounts)
}
