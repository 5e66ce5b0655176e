package storage

import (
	"context"
	"fmt"
	"time"

	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

// Limits of what a registry may hand out. The library itself bounds manifests
// and configs to 4 MiB each.
const (
	maxInstances = 1000 // of an index
	maxLayers    = 500  // the most that overlay stacks
)

// source is an image in a registry, reached and looked at. It is a reference
// whose NewImageSource gives out what is open already, so that the copy that
// follows asks the registry nothing twice but the manifest of an index's
// instance.
type source struct {
	types.ImageReference
	opened types.ImageSource
	name   reference.Named
}

// openSource reaches the first of the name's mirrors, or the registry itself,
// that has the image, and inspects its manifest. It gives up after limit.
func openSource(ctx context.Context, sys *types.SystemContext, name reference.Named, limit time.Duration) (*source, error) {
	ref, err := docker.NewReference(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", fault.Invalid, err)
	}
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, errStalled)
		defer cancel()
	}
	opened, err := ref.NewImageSource(ctx, sys)
	if err != nil {
		return nil, causeOf(ctx, err)
	}
	if err := inspect(ctx, sys, opened); err != nil {
		opened.Close()
		return nil, causeOf(ctx, err)
	}
	return &source{ImageReference: ref, opened: opened, name: name}, nil
}

// NewImageSource implements types.ImageReference.
func (s *source) NewImageSource(context.Context, *types.SystemContext) (types.ImageSource, error) {
	return s.opened, nil
}

// inspect checks the manifest, and behind an index that of this platform's
// instance, before anything is fetched on its word.
func inspect(ctx context.Context, sys *types.SystemContext, src types.ImageSource) error {
	raw, mediaType, err := image.UnparsedInstance(src, nil).Manifest(ctx)
	if err != nil {
		return err
	}
	if manifest.MIMETypeIsMultiImage(mediaType) {
		list, err := manifest.ListFromBlob(raw, mediaType)
		if err != nil {
			return fmt.Errorf("image index: %w: %w", fault.Invalid, err)
		}
		if n := len(list.Instances()); n > maxInstances {
			return fmt.Errorf("image index: %w: it lists %d images, more than %d", fault.Invalid, n, maxInstances)
		}
		chosen, err := list.ChooseInstance(sys)
		if err != nil {
			return fmt.Errorf("image index: %w: %w", fault.NotFound, err)
		}
		raw, mediaType, err = image.UnparsedInstance(src, &chosen).Manifest(ctx)
		if err != nil {
			return err
		}
		if manifest.MIMETypeIsMultiImage(mediaType) {
			return fmt.Errorf("image index: %w: it leads to another index", fault.Invalid)
		}
	}
	parsed, err := manifest.FromBlob(raw, mediaType)
	if err != nil {
		return fmt.Errorf("image manifest: %w: %w", fault.Invalid, err)
	}
	return inspectManifest(parsed)
}

// inspectManifest refuses digests that are none (CVE-2024-3727), layers that
// are to be fetched from servers of the image's choice (CVE-2020-15157), and
// more layers than can be mounted.
func inspectManifest(m manifest.Manifest) error {
	layers := m.LayerInfos()
	if len(layers) > maxLayers {
		return fmt.Errorf("image manifest: %w: %d layers, more than %d", fault.Invalid, len(layers), maxLayers)
	}
	if config := m.ConfigInfo(); !isSchema1(m) {
		if err := config.Digest.Validate(); err != nil {
			return fmt.Errorf("image manifest: %w: config digest %q: %w", fault.Invalid, config.Digest, err)
		}
	}
	for i, layer := range layers {
		if err := layer.Digest.Validate(); err != nil {
			return fmt.Errorf("image manifest: %w: digest %q of layer %d: %w", fault.Invalid, layer.Digest, i, err)
		}
		if layer.Size < 0 && !isSchema1(m) {
			return fmt.Errorf("image manifest: %w: layer %d has a size of %d", fault.Invalid, i, layer.Size)
		}
		if len(layer.URLs) > 0 {
			return fmt.Errorf("image manifest: %w: layer %d is a foreign one, to be fetched from %q; crius fetches from the image's registry only",
				fault.Invalid, i, layer.URLs[0])
		}
	}
	return nil
}

// isSchema1: Docker's oldest format has no config and tells no sizes.
func isSchema1(m manifest.Manifest) bool {
	_, is := m.(*manifest.Schema1)
	return is
}
