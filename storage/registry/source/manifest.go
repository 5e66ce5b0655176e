package source

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"

	"github.com/crius-run/crius/internal/fault"
)

// fetch fetches a manifest and checks its digest. What the manifest says of its type counts if the
// registry says nothing, or something that is not the type of a manifest: servers of files do.
func fetch(ctx context.Context, image *image.UnparsedImage) (raw []byte, mediaType string, err error) {
	defer malformed(&err)
	raw, mediaType, err = image.Manifest(ctx)
	if err == nil && !slices.Contains(manifest.DefaultRequestedManifestMIMETypes, mediaType) {
		mediaType = cmp.Or(manifest.GuessMIMEType(raw), mediaType)
	}
	return raw, mediaType, err
}

func parse(raw []byte, mediaType string) (parsed manifest.Manifest, err error) {
	defer malformed(&err)
	return manifest.FromBlob(raw, mediaType)
}

// noManifest returns the error of a manifest that cannot be used: err, unless what came is something else.
func noManifest(raw []byte, err error) error {
	var document struct {
		SchemaVersion int               `json:"schemaVersion"`
		Errors        []json.RawMessage `json:"errors"`
	}
	const advice = "check whether a proxy, a login page or a broken registry answers in its place"
	switch invalid := json.Unmarshal(raw, &document); {
	case len(raw) == 0:
		return fmt.Errorf("image manifest: the answer is empty; %s: %w", advice, fault.Invalid)
	case invalid != nil && raw[0] == '{':
		return fmt.Errorf("image manifest: the answer is cut off or broken JSON (%w); check whether a proxy or a mirror has cut it, or push the image again: %w", invalid, fault.Invalid)
	case invalid != nil:
		return fmt.Errorf("image manifest: the answer is no JSON and begins with %.60q; %s: %w", raw, advice, fault.Invalid)
	case document.SchemaVersion == 0 && len(document.Errors) > 0:
		return fmt.Errorf("image manifest: the answer has an error in the place of a manifest, %.200s; see the log of the registry, or what answers in its place: %w", document.Errors[0], fault.Invalid)
	}
	return err
}

// malformed turns a panic into an error: libtrust, which reads the signatures inside manifests of
// schema 1, trusts the lengths that they name.
func malformed(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("malformed manifest (%v): %w", p, fault.Invalid)
	}
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
