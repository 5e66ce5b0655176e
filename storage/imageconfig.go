package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	imagetransport "go.podman.io/image/v5/storage"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/registry/source"
)

// Limits of the configs in memory. Larger ones, and those of further images, are read when they are
// needed.
const (
	maxKept    = 16 << 10 // bytes, for one image
	maxKeptSum = 32 << 20 // bytes, for all images
)

// specOf reads the whole config of a stored image with this manifest.
func specOf(ctx context.Context, store cstorage.Store, id string, manifest []byte) (*imagespec.Image, error) {
	if raw := source.StoredConfig(store, id, manifest); raw != nil {
		if err := source.CheckConfig(raw); err != nil {
			return nil, err
		}
		spec := new(imagespec.Image)
		return spec, json.Unmarshal(raw, spec)
	}
	stored, err := openStored(ctx, store, id) // the format may be one that only the library knows
	if err != nil {
		return nil, err
	}
	defer func() { _ = stored.Close() }()
	raw, err := stored.ConfigBlob(ctx)
	if err != nil {
		return nil, err
	}
	if err := source.CheckConfig(raw); err != nil {
		return nil, err
	}
	spec, err := stored.OCIConfig(ctx)
	if err == nil {
		err = source.CheckUser(spec.Config.User) // Docker's oldest format has no config, but a user
	}
	if err != nil {
		return nil, err
	}
	return spec, nil
}

// estimate returns the size of an image as the library reckons it.
func estimate(ctx context.Context, store cstorage.Store, id string) (uint64, error) {
	stored, err := openStored(ctx, store, id)
	if err != nil {
		return 0, err
	}
	defer func() { _ = stored.Close() }()
	size, err := stored.Size()
	return uint64(max(size, 0)), err
}

// openStored opens a stored image. The library looks up each of its layers for that.
func openStored(ctx context.Context, store cstorage.Store, id string) (types.ImageCloser, error) {
	ref, err := imagetransport.Transport.NewStoreReference(store, nil, id)
	if err != nil {
		return nil, err
	}
	stored, err := ref.NewImage(ctx, nil)
	if errors.Is(err, cstorage.ErrLayerUnknown) {
		err = fmt.Errorf("%w: %w", durable.ErrLayersLost, err)
	}
	return stored, err
}

// runConfig returns the part of a config from which containers are made.
func runConfig(c *imagespec.ImageConfig) *imagespec.ImageConfig {
	return &imagespec.ImageConfig{
		User:       c.User,
		Env:        c.Env,
		Entrypoint: c.Entrypoint,
		Cmd:        c.Cmd,
		WorkingDir: c.WorkingDir,
		StopSignal: c.StopSignal,
		Volumes:    c.Volumes,
	}
}

// keptBytes returns approximately the memory that a run config takes.
func keptBytes(c *imagespec.ImageConfig) int {
	sum := len(c.User) + len(c.WorkingDir) + len(c.StopSignal)
	for _, list := range [][]string{c.Env, c.Entrypoint, c.Cmd} {
		for _, text := range list {
			sum += len(text) + 16
		}
	}
	for name := range c.Volumes {
		sum += len(name) + 32 // and its part of the map
	}
	return sum
}

// trim removes config and annotations from the image if they exceed left bytes or the limit, and
// returns the bytes that are kept.
func (i *Image) trim(left int) int {
	kept := keptBytes(i.Config) + source.Bytes(i.Annotations)
	if kept > min(maxKept, left) {
		i.Config, i.Annotations, i.trimmed = &imagespec.ImageConfig{User: i.Config.User}, nil, true
		return len(i.Config.User)
	}
	return kept
}

// whole returns the image with its whole run config.
func (i *Image) whole(ctx context.Context, s *Store) (*Image, error) {
	if !i.trimmed {
		return i, nil
	}
	spec, err := s.Spec(ctx, i)
	if err != nil {
		return nil, err
	}
	whole := *i
	whole.Config, whole.trimmed = runConfig(&spec.Config), false
	return &whole, nil
}

// Spec reads the whole config of an image, of up to 4 MiB. If the image has been removed, the error
// is fault.NotFound.
func (s *Store) Spec(ctx context.Context, image *Image) (*imagespec.Image, error) {
	if err := s.locks.Await(ctx, durable.ToRead); err != nil {
		return nil, fmt.Errorf("read image config: %w", err)
	}
	manifest, _ := s.store.ImageBigData(image.ID, cstorage.ImageDigestBigDataKey) // without one, specOf says what is wrong
	spec, err := specOf(ctx, s.store, image.ID, manifest)
	if errors.Is(err, imagetransport.ErrNoSuchImage) || errors.Is(err, cstorage.ErrImageUnknown) {
		err = fmt.Errorf("image %s %w", image.ID, fault.NotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read image config: %w", err)
	}
	return spec, nil
}
