package source

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/download"
)

// fetchManifest fetches a manifest, that of the image's name if instance is nil, and checks its digest. What
// the manifest says of its type counts if the registry says nothing, or something that is not the type of a
// manifest: servers of files do. Of a manifest that does not say its own type, its config's counts more than the
// registry: some take all manifests of images for Docker's.
func (s *Image) fetchManifest(ctx context.Context, instance *digest.Digest) (raw []byte, mediaType string, err error) {
	defer malformed(&err)
	raw, mediaType, err = image.UnparsedInstance(s.ImageSource, instance).Manifest(ctx)
	if err != nil {
		return nil, "", s.differs(ctx, instance, tooLarge(err))
	}
	var document struct {
		MediaType string `json:"mediaType"`
	}
	said := json.Unmarshal(raw, &document) == nil && document.MediaType != ""
	switch is := manifest.GuessMIMEType(raw); {
	case !slices.Contains(manifest.DefaultRequestedManifestMIMETypes, mediaType):
		mediaType = cmp.Or(is, mediaType)
	case !said && is == imagespec.MediaTypeImageManifest && mediaType == manifest.DockerV2Schema2MediaType:
		mediaType = is
	}
	return raw, mediaType, nil
}

// largeManifest is how the library's error ends for a manifest above its limit. It has no type for it.
var largeManifest = regexp.MustCompile(`reading manifest body .*: exceeded maximum allowed size of (\d+) bytes$`)

// tooLarge returns the error of a manifest that the library has not read to its end: err, unless it is too large.
func tooLarge(err error) error {
	limit := largeManifest.FindStringSubmatch(err.Error())
	if limit == nil {
		return err
	}
	return fmt.Errorf("image manifest: it has more than %s bytes, the most that registries have to accept; rebuild the image with fewer or shorter annotations, if a manifest is what the registry sends: %w", limit[1], fault.Invalid)
}

// misread returns the error of a manifest that cannot be parsed as what the registry says that it is.
func misread(document Document, err error) error {
	if is := manifest.GuessMIMEType(document.Content); is != "" && is != document.MediaType {
		return fmt.Errorf("the registry serves it as %s, and it is %.100q; correct the registry or what is before it, or push the image again: %w", document.MediaType, is, fault.Invalid)
	}
	return fmt.Errorf("%w; rebuild the image: %w", err, fault.Invalid)
}

// differs returns the error of a manifest that cannot be fetched: err, unless what comes has another digest, for
// which the library has no type.
func (s *Image) differs(ctx context.Context, instance *digest.Digest, err error) error {
	named, byDigest := s.ImageSource.Reference().DockerReference().(reference.Canonical)
	switch {
	case len(pullerror.Kinds(err)) > 0, pullerror.StatusOf(err) != 0:
		return err
	case instance == nil && byDigest:
		instance = new(named.Digest())
	case instance == nil:
		return err
	}
	raw, _, again := s.ImageSource.GetManifest(ctx, instance)
	if same, malformed := manifest.MatchesDigest(raw, *instance); again != nil || same || malformed != nil {
		return err
	}
	return s.noManifest(raw, fmt.Errorf("image manifest: the registry sent another one than %s: %w", instance, download.ErrDiffers))
}

func parse(raw []byte, mediaType string) (parsed manifest.Manifest, err error) {
	defer malformed(&err)
	return manifest.FromBlob(raw, mediaType)
}

// noManifest returns the error of a manifest that cannot be used: err, unless what came is something else.
func (s *Image) noManifest(raw []byte, err error) error {
	var document struct {
		SchemaVersion int `json:"schemaVersion"`
	}
	invalid := json.Unmarshal(raw, &document)
	what, do := pullerror.Instead(raw, int64(len(raw)))
	kind := fault.Unavailable
	if what == "" || len(raw) == 0 { // it may have been pushed so
		kind = fault.Invalid
	}
	switch {
	case what != "" && (invalid != nil || document.SchemaVersion == 0):
	case invalid == nil:
		return err
	case raw[0] == '{':
		what, do = fmt.Sprintf("is cut off or broken JSON (%v)", invalid), "check whether a proxy or a mirror has cut it, or push the image again"
	default:
		what, do = fmt.Sprintf("is no JSON and begins with %.60q", raw), "check what answers in the place of the registry"
	}
	return pullerror.Explained(fmt.Errorf("image manifest: %s %s; %s: %w", answerOf(s.requests.sentOn()), what, do, kind))
}

// answerOf names an answer by whom the registry has sent crius to; empty: to nobody.
func answerOf(by string) string {
	if by == "" {
		return "the answer"
	}
	return fmt.Sprintf("the answer of %s,", by)
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
		return fmt.Errorf("image manifest: it has %d layers, more than %d; rebuild the image with fewer: %w", len(layers), limit, fault.Invalid)
	}
	if err := inspectConfigInfo(m); err != nil {
		return err
	}
	for i, layer := range layers {
		if err := layer.Digest.Validate(); err != nil {
			return fmt.Errorf("image manifest: digest %q of layer %d: %w: %w", layer.Digest, i, err, fault.Invalid)
		}
		if empty := layer.Size == 0 && (isArtifact(m) || layer.Digest == layer.Digest.Algorithm().FromBytes(nil)); layer.Size <= 0 && !empty && !isSchema1(m) {
			return fmt.Errorf("image manifest: layer %d has a size of %d; rebuild the image: %w", i, layer.Size, fault.Invalid)
		}
		if len(layer.URLs) > 0 {
			return fmt.Errorf("image manifest: layer %d is a foreign layer from %q, but crius fetches only from the image's registry: %w", i, layer.URLs[0], fault.Invalid)
		}
	}
	return nil
}

// inspectConfigInfo refuses a config with an invalid digest, or on a server of the image's choice.
func inspectConfigInfo(m manifest.Manifest) error {
	if isSchema1(m) {
		return nil
	}
	config := m.ConfigInfo()
	if err := config.Digest.Validate(); err != nil {
		return fmt.Errorf("image manifest: config digest %q: %w: %w", config.Digest, err, fault.Invalid)
	}
	if len(config.URLs) > 0 {
		return fmt.Errorf("image manifest: the config would have to be fetched from the foreign URL %q, but crius fetches only from the image's registry: %w", config.URLs[0], fault.Invalid)
	}
	return nil
}

// isSchema1 reports whether a manifest has Docker's oldest format, without config and sizes.
func isSchema1(m manifest.Manifest) bool {
	_, is := m.(*manifest.Schema1)
	return is
}
