package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/nri"
	"github.com/crius-run/crius/oci/annotation"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/pod/mountsconf"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
)

// admitVolumes finds the images that a container mounts. Like the container's own image, they
// have been pulled before (CRI: Mount.image).
func admitVolumes(ctx context.Context, images Images, pod *cri.PodSandboxConfig, mounts []*cri.Mount) ([]records.Volume, error) {
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

// admitImage finds an image that was pulled before, and asks the signature policy of the pod's
// namespace about it, since another namespace may have pulled it.
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

// makeVolumes makes the directories that the image declares as volumes
// (docs/decisions/0027-image-volumes.md), and returns those that are mounted.
func (c *Container) makeVolumes(ctx context.Context, in spec.Input) ([]string, error) {
	mode := c.engine.policy().ImageVolumes
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

// copyNodeFiles makes the container's copies of the files that the node's mounts.conf lists.
func (c *Container) copyNodeFiles(ctx context.Context, asked annotation.Asked) (mounts []*cri.Mount, err error) {
	set, problems := mountsconf.Read(c.engine.policy().MountsFiles, mountsconf.FIPSFile)
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

// makeDevices makes the device nodes of a container in a user namespace, where its runtime cannot.
func (c *Container) makeDevices(ctx context.Context, in *spec.Input, s *nri.Spec) error {
	nodes := spec.TakeDevices(in, s)
	if len(nodes) == 0 {
		return nil
	}
	return trace.Call(ctx, "make device nodes", func() error {
		dir := c.roots.devices()
		if err := errors.Join(mount.Devices(dir, c.plan.MountLabel), c.sandbox.files.LetIn(dir)); err != nil {
			return err
		}
		return spec.MakeDevices(in, s, dir, nodes)
	})
}
