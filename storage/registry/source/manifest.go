package source

import (
	"context"
	"fmt"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

// fetch fetches a manifest and checks its digest.
func fetch(ctx context.Context, image *image.UnparsedImage) (raw []byte, mediaType string, err error) {
	defer malformed(&err)
	return image.Manifest(ctx)
}

func parse(raw []byte, mediaType string) (parsed manifest.Manifest, err error) {
	defer malformed(&err)
	return manifest.FromBlob(raw, mediaType)
}

// malformed turns a panic into an error: libtrust, which reads the signatures inside manifests of
// schema 1, trusts the lengths that they name.
func malformed(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("malformed manifest (%v): %w", p, fault.Invalid)
	}
}

func chooseInstance(sys *types.SystemContext, raw []byte, mediaType string) (digest.Digest, error) {
	list, err := manifest.ListFromBlob(raw, mediaType)
	if err != nil {
		return "", fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	if n := len(list.Instances()); n > MaxInstances {
		return "", fmt.Errorf("it lists %d images, more than %d: %w", n, MaxInstances, fault.Invalid)
	}
	chosen, err := list.ChooseInstance(sys)
	if err != nil {
		return "", fmt.Errorf("%w: %w", err, fault.NotFound)
	}
	if err := chosen.Validate(); err != nil {
		return "", fmt.Errorf("digest %q: %w: %w", chosen, err, fault.Invalid)
	}
	return chosen, nil
}

// inspectManifest refuses invalid digests (CVE-2024-3727), blobs on servers of the image's choice
// (CVE-2020-15157), and more layers than can be mounted.
func inspectManifest(m manifest.Manifest) error {
	layers, limit := m.LayerInfos(), MaxLayers
	if isArtifact(m) {
		limit = MaxFiles
	}
	if len(layers) > limit {
		return fmt.Errorf("image manifest: %d layers, more than %d: %w", len(layers), limit, fault.Invalid)
	}
	if config := m.ConfigInfo(); !isSchema1(m) {
		if err := config.Digest.Validate(); err != nil {
			return fmt.Errorf("image manifest: config digest %q: %w: %w", config.Digest, err, fault.Invalid)
		}
		if len(config.URLs) > 0 {
			return fmt.Errorf("image manifest: the config would have to be fetched from the foreign URL %q, but crius fetches only from the image's registry: %w", config.URLs[0], fault.Invalid)
		}
	}
	for i, layer := range layers {
		if err := layer.Digest.Validate(); err != nil {
			return fmt.Errorf("image manifest: digest %q of layer %d: %w: %w", layer.Digest, i, err, fault.Invalid)
		}
		if empty := layer.Size == 0 && isArtifact(m); layer.Size <= 0 && !empty && !isSchema1(m) {
			return fmt.Errorf("image manifest: layer %d has a size of %d: %w", i, layer.Size, fault.Invalid)
		}
		if len(layer.URLs) > 0 {
			return fmt.Errorf("image manifest: layer %d is a foreign layer from %q, but crius fetches only from the image's registry: %w", i, layer.URLs[0], fault.Invalid)
		}
	}
	return nil
}

// isSchema1 reports whether a manifest has Docker's oldest format, without config and sizes.
func isSchema1(m manifest.Manifest) bool {
	_, is := m.(*manifest.Schema1)
	return is
}
