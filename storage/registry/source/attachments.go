package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/BurntSushi/toml"
	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/pkg/blobinfocache/none"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/notice"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/trust"
)

// attachments reads the sigstore attachments of an image: signatures that are the layers of an
// artifact in the image's repository, under a tag made of the image's digest.
//
// The library would read any number of them into memory, of 4 MiB each, so crius keeps it from
// reading any (docs/decisions/0029-attachments.md).
type attachments struct {
	sys       *types.SystemContext
	name      reference.Named              // of the image
	sources   []sysregistriesv2.PullSource // of the image, in the order in which the library tries them
	locations *trust.Locations
	dir       string // for what the library reads
}

// takeAttachments returns the reader for the attachments of an image, and changes sys so that the
// library does not read them. It returns nil if registries.d has no attachments for the image. The
// library then reads files in dir instead of registries.d; dir must stay as long as sys is used.
func takeAttachments(sys *types.SystemContext, ref types.ImageReference, dir string) (*attachments, error) {
	name := ref.DockerReference()
	locations, err := trust.ReadLocations(sys, ref)
	if err != nil {
		return nil, err
	}
	sources, err := pullSources(sys, name)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(sources, func(s sysregistriesv2.PullSource) bool { return locations.Attachments(s.Reference) }) {
		return nil, nil //nolint:nilnil // see above
	}
	sys.RegistriesDirPath = filepath.Join(dir, "registries.d")
	return &attachments{sys, name, sources, locations, dir}, locations.WriteWithoutAttachments(sys.RegistriesDirPath)
}

// pullSources returns the image's mirrors and its registry.
func pullSources(sys *types.SystemContext, name reference.Named) ([]sysregistriesv2.PullSource, error) {
	registry, err := sysregistriesv2.FindRegistry(sys, name.Name())
	if err != nil {
		return nil, err
	}
	if registry == nil {
		return []sysregistriesv2.PullSource{{Reference: name}}, nil
	}
	return registry.PullSourcesFromReference(name)
}

// Sources returns the repositories from which an image may be pulled.
func Sources(sys *types.SystemContext, name reference.Named) []notice.Source {
	sources, err := pullSources(sys, name)
	if err != nil {
		sources = []sysregistriesv2.PullSource{{Reference: name}}
	}
	list := make([]notice.Source, len(sources))
	for i, s := range sources {
		list[i] = notice.Source{Host: reference.Domain(s.Reference), Repository: reference.Path(s.Reference)}
	}
	return list
}

// addAttachments adds the attachments to the image's signatures, and returns the image with all of
// them for the signature policy. dropped counts attachments beyond the limits.
func (s *Image) addAttachments(ctx context.Context, unparsed types.UnparsedImage) (signed types.UnparsedImage, dropped int, err error) {
	if s.attachments == nil {
		return unparsed, 0, nil
	}
	of := s.Manifest()
	if _, inIndex := s.Manifests[of]; !inIndex {
		if of, err = manifest.Digest(s.Manifests[""].Content); err != nil {
			return nil, 0, err
		}
	}
	blobs, dropped, err := s.attachments.read(ctx, of)
	if err != nil || len(blobs) == 0 {
		return unparsed, dropped, err
	}
	all := trust.Union(s.Signatures, blobs)
	dropped += len(s.Signatures) + len(blobs) - len(all)
	s.Signatures = all
	signed, err = trust.WithSignatures(ctx, unparsed, all, s.attachments.dir)
	return signed, dropped, err
}

// read fetches the attachments of a manifest, in the form of trust.Blobs and within its limits.
// dropped counts the others.
func (a *attachments) read(ctx context.Context, of digest.Digest) (blobs [][]byte, dropped int, err error) {
	src, err := a.open(ctx, of)
	if err != nil || src == nil {
		return nil, 0, err
	}
	defer func() { _ = src.Close() }()
	raw, mediaType, err := src.GetManifest(ctx, nil)
	if err != nil {
		return nil, 0, err
	}
	if mediaType != imagespec.MediaTypeImageManifest {
		return nil, 0, fmt.Errorf("their manifest has the media type %q, want %q: %w", mediaType, imagespec.MediaTypeImageManifest, fault.Invalid)
	}
	if err := checkTokens(raw); err != nil {
		return nil, 0, fmt.Errorf("their manifest: %w", err)
	}
	parsed, err := manifest.OCI1FromManifest(raw)
	if err != nil {
		return nil, 0, fmt.Errorf("their manifest: %w: %w", err, fault.Invalid)
	}
	room := trust.MaxSignatureSize
	for i, layer := range parsed.Layers {
		if i == trust.MaxSignatures {
			return blobs, dropped + len(parsed.Layers) - i, nil
		}
		blob, err := readAttachment(ctx, src, layer, room)
		if errors.Is(err, errTooLarge) {
			dropped++
			continue
		}
		if err != nil {
			return nil, 0, fmt.Errorf("digest %q: %w", layer.Digest, err)
		}
		blobs = append(blobs, blob)
		room -= len(blob)
	}
	return blobs, dropped, nil
}

// open opens the artifact with the attachments of a manifest at the first pull source that has the
// image. It returns nil if the artifact does not exist, or need not be read.
func (a *attachments) open(ctx context.Context, of digest.Digest) (types.ImageSource, error) {
	if err := of.Validate(); err != nil {
		return nil, err
	}
	for i, source := range a.sources {
		sys, err := a.only(i)
		if err != nil {
			return nil, err
		}
		if i < len(a.sources)-1 {
			image, err := openSource(ctx, sys, source.Reference)
			if err != nil {
				continue // like the library
			}
			_ = image.Close()
		}
		if !a.locations.Attachments(source.Reference) {
			break
		}
		name, err := reference.WithTag(reference.TrimNamed(source.Reference), of.Algorithm().String()+"-"+of.Encoded()+".sig")
		if err != nil {
			return nil, err
		}
		artifact, err := openSource(ctx, sys, name)
		if isUnknown(err) {
			break
		}
		return artifact, err
	}
	return nil, nil //nolint:nilnil // see above
}

// only returns a sys with which the library asks the i-th pull source alone, and in the same way as
// for the image.
func (a *attachments) only(i int) (*types.SystemContext, error) {
	source := a.sources[i]
	helpers, err := sysregistriesv2.CredentialHelpers(a.sys)
	if err != nil {
		return nil, err
	}
	registry := sysregistriesv2.Registry{Prefix: source.Reference.Name(), Endpoint: source.Endpoint}
	registry.Location, registry.PullFromMirror = registry.Prefix, ""
	known, err := sysregistriesv2.FindRegistry(a.sys, registry.Prefix)
	if err != nil {
		return nil, err
	}
	registry.Blocked = known != nil && known.Blocked
	text, err := toml.Marshal(sysregistriesv2.V2RegistriesConf{Registries: []sysregistriesv2.Registry{registry}, CredentialHelpers: helpers})
	if err != nil {
		return nil, err
	}
	sys := *a.sys
	sys.SystemRegistriesConfPath = filepath.Join(a.dir, fmt.Sprintf("registries-%d.conf", i))
	sys.SystemRegistriesConfDirPath = sys.SystemRegistriesConfPath + ".d" // is not there
	if reference.Domain(source.Reference) != reference.Domain(a.name) {
		sys.DockerAuthConfig, sys.DockerBearerRegistryToken = nil, "" // are not for mirrors
	}
	return &sys, os.WriteFile(sys.SystemRegistriesConfPath, text, 0o600)
}

func openSource(ctx context.Context, sys *types.SystemContext, name reference.Named) (types.ImageSource, error) {
	ref, err := docker.NewReference(name)
	if err != nil {
		return nil, err
	}
	return ref.NewImageSource(ctx, sys)
}

// isUnknown reports whether a registry says that it does not have a manifest.
func isUnknown(err error) bool {
	return err != nil && slices.Contains(pullerror.Kinds(err), fault.NotFound)
}

var errTooLarge = errors.New("too large")

// readAttachment fetches an attachment in the form of trust.Blobs. The error is errTooLarge if it
// has more than limit bytes.
func readAttachment(ctx context.Context, src types.ImageSource, layer imagespec.Descriptor, limit int) ([]byte, error) {
	if err := layer.Digest.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	stream, _, err := src.GetBlob(ctx, types.BlobInfo{Digest: layer.Digest, Size: -1}, none.NoCache)
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	payload, err := io.ReadAll(io.LimitReader(stream, int64(limit)+1))
	if err != nil {
		return nil, err
	}
	if len(payload) > limit {
		return nil, errTooLarge
	}
	if got := layer.Digest.Algorithm().FromBytes(payload); got != layer.Digest {
		return nil, fmt.Errorf("the content has the digest %s", got)
	}
	blob, err := trust.SigstoreBlob(layer.MediaType, payload, layer.Annotations)
	if err == nil && len(blob) > limit {
		err = errTooLarge
	}
	return blob, err
}
