package source

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull/pullerror"
)

// Limits of indexes in an index. Real ones have two levels.
const (
	maxIndexLevels    = 4
	maxIndexDocuments = 10 // that are fetched to find the manifest of this platform
)

// Reference implements types.ImageSource. If the library is not shown the indexes, it is not shown the
// digest of one either.
func (s *Image) Reference() types.ImageReference {
	ref := s.ImageSource.Reference()
	if len(s.Indexes) == 0 {
		return ref
	}
	named, err := reference.WithDigest(reference.TrimNamed(s.Name), s.Manifest())
	if err != nil {
		return ref
	}
	return shownReference{ref, named}
}

// shownReference is a reference under another name.
type shownReference struct {
	types.ImageReference
	named reference.Named
}

// DockerReference implements types.ImageReference.
func (r shownReference) DockerReference() reference.Named { return r.named }

// search looks for this platform's manifest below an index.
type search struct {
	image *Image
	sys   *types.SystemContext

	entries, documents int        // seen so far
	several            bool       // one of the indexes has several entries
	way                []Document // the indexes that lead to the manifest
	others             []string   // platforms of images that were passed over, up to maxOthers
}

// maxOthers is how many platforms an error names.
const maxOthers = 8

// pass notes the platform of an image that this node does not run. Attestations have none.
func (f *search) pass(p imagespec.Platform) {
	const most = 32 // bytes
	name := strings.TrimSuffix(p.OS+"/"+p.Architecture+"/"+p.Variant, "/")
	if p.OS != "unknown" && len(name) <= most && len(f.others) < maxOthers && !slices.Contains(f.others, name) {
		f.others = append(f.others, name)
	}
}

// instead says for which platforms there are images.
func (f *search) instead() string {
	if len(f.others) == 0 {
		return ""
	}
	return ", only for " + strings.Join(f.others, ", ")
}

// choose finds the manifest of this platform below the index to which the name refers, and notes it.
//
// If the library would choose another one or none, it is shown the manifest alone, and the indexes are in
// Indexes: it knows neither indexes in an index nor other spellings of platforms.
func (s *Image) choose(ctx context.Context, sys *types.SystemContext, index Document) (*image.UnparsedImage, error) {
	find := search{image: s, sys: sys}
	chosen, document, err := find.in(ctx, index)
	if err != nil {
		return nil, fmt.Errorf("image index: %w", err)
	}
	if usual, err := chooseInstance(sys, index.Content, index.MediaType); err == nil && usual == chosen && len(find.way) == 1 {
		s.Manifests[chosen] = document
	} else {
		s.Manifests[""], s.Indexes = document, find.way
	}
	return image.UnparsedInstance(s.ImageSource, &chosen), nil
}

// in looks in one index. The error is fault.NotFound if there is no manifest for this platform.
func (f *search) in(ctx context.Context, index Document) (digest.Digest, Document, error) {
	var none Document
	if len(f.way) == maxIndexLevels {
		return "", none, fmt.Errorf("it has indexes in indexes on more than %d levels; rebuild it with fewer: %w", maxIndexLevels, fault.Invalid)
	}
	f.way = append(f.way, index)
	candidates, unnamed, err := f.candidates(index)
	if err != nil {
		return "", none, err
	}
	for _, chosen := range candidates {
		if err := chosen.Validate(); err != nil {
			return "", none, fmt.Errorf("digest %q: %w: %w", chosen, err, fault.Invalid)
		}
		if chosen.Algorithm() != digest.Canonical { // the library would take the manifest for another one
			return "", none, fmt.Errorf("the digest of a manifest can only be by %s, not by %s; rebuild the image: %w", digest.Canonical, chosen.Algorithm(), fault.Invalid)
		}
		if f.documents++; f.documents > maxIndexDocuments {
			return "", none, fmt.Errorf("more than %d of its documents would have to be fetched to find one for this platform; rebuild it with the platform of each image: %w", maxIndexDocuments, fault.Invalid)
		}
		raw, mediaType, err := f.image.fetchManifest(ctx, &chosen)
		if err != nil {
			return "", none, f.image.requests.ofPart(err)
		}
		document := Document{raw, mediaType}
		if !manifest.MIMETypeIsMultiImage(mediaType) {
			if !slices.Contains(unnamed, chosen) {
				return chosen, document, nil
			}
			if is, err := f.configIsForThis(ctx, document); is || err != nil {
				return chosen, document, err
			}
			continue
		}
		found, below, err := f.in(ctx, document)
		if err == nil || !errors.Is(err, fault.NotFound) {
			return found, below, err
		}
	}
	f.way = f.way[:len(f.way)-1]
	err = fmt.Errorf("it has no image for %s/%s%s: %w", runtime.GOOS, runtime.GOARCH, f.instead(), fault.NotFound)
	return "", none, pullerror.At(pullerror.Point{Step: pullerror.Choice}, err)
}

// candidates returns what an index has for this platform: first what the library chooses, then what has
// another spelling of the platform, then what has none, and indexes that may have something. Images that want
// features of the operating system, such as those that Nydus adds beside ordinary ones, come after other images.
// Of images without a platform, which are unnamed, the config decides if there are others, as with containerd.
func (f *search) candidates(index Document) (found, unnamed []digest.Digest, err error) {
	var list struct {
		Manifests []imagespec.Descriptor `json:"manifests"`
	}
	if err := json.Unmarshal(index.Content, &list); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	if f.entries += len(list.Manifests); f.entries > MaxInstances {
		return nil, nil, fmt.Errorf("it lists %d images, more than %d; rebuild it with fewer: %w", f.entries, MaxInstances, fault.Invalid)
	}
	usual, err := chooseInstance(f.sys, index.Content, index.MediaType)
	switch {
	case err == nil:
		found = append(found, usual)
	case !errors.Is(err, fault.NotFound):
		return nil, nil, misread(index, err)
	}
	var indexes []digest.Digest
	for _, d := range list.Manifests {
		platform := platformIn(d)
		switch {
		case platform != nil && slices.Contains(found, d.Digest):
		case platform != nil && !isThisPlatform(*platform):
			f.pass(*platform)
		case manifest.MIMETypeIsMultiImage(d.MediaType):
			indexes = append(indexes, d.Digest)
		case platform != nil:
			found = append(found, d.Digest)
		default:
			unnamed = append(unnamed, d.Digest)
		}
	}
	found = slices.DeleteFunc(found, func(one digest.Digest) bool { return slices.Contains(unnamed, one) || slices.Contains(indexes, one) })
	special := func(one digest.Digest) bool {
		return slices.ContainsFunc(list.Manifests, func(d imagespec.Descriptor) bool {
			return d.Digest == one && d.Platform != nil && len(d.Platform.OSFeatures) > 0
		})
	}
	slices.SortStableFunc(found, func(a, b digest.Digest) int {
		switch {
		case special(a) == special(b):
			return 0
		case special(a):
			return 1
		}
		return -1
	})
	found = slices.Concat(found, unnamed, indexes)
	if f.several = f.several || len(list.Manifests) > 1; !f.several {
		unnamed = nil
	}
	return found, unnamed, nil
}

// platformIn returns the platform that an index names for one of its entries; nil if it names none, or no
// architecture. One without an operating system is for Linux.
func platformIn(d imagespec.Descriptor) *imagespec.Platform {
	if d.Platform == nil || d.Platform.Architecture == "" && (d.Platform.OS == "" || d.Platform.OS == runtime.GOOS) {
		return nil
	}
	platform := *d.Platform
	platform.OS = cmp.Or(platform.OS, runtime.GOOS)
	return &platform
}

// configIsForThis reports whether the config of an image names this platform, or no architecture.
func (f *search) configIsForThis(ctx context.Context, document Document) (bool, error) {
	parsed, err := parse(document.Content, document.MediaType)
	if err != nil || isSchema1(parsed) || isArtifact(parsed) { // inspect says what is wrong with it
		return true, nil //nolint:nilerr // see above
	}
	if err := inspectConfigInfo(parsed); err != nil {
		return false, err
	}
	if err := f.image.readConfig(ctx, parsed.ConfigInfo()); err != nil {
		return false, err
	}
	var config imagespec.Platform
	_ = json.Unmarshal(f.image.Config, &config) // one that is broken names none
	platform := platformIn(imagespec.Descriptor{Platform: &config})
	if platform == nil || isThisPlatform(*platform) {
		return true, nil
	}
	f.pass(*platform)
	f.image.Config, f.image.ConfigDigest = nil, ""
	return false, nil
}

// architectures are other names of Go's.
var architectures = map[string]string{"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "i386": "386", "i686": "386", "armhf": "arm", "armel": "arm"}

// isThisPlatform reports whether every processor of the node's architecture runs what is made for a
// platform, however it is spelled.
func isThisPlatform(p imagespec.Platform) bool {
	architecture := strings.ToLower(p.Architecture)
	if name, known := architectures[architecture]; known {
		architecture = name
	}
	variant := strings.TrimPrefix(strings.ToLower(p.Variant), "v")
	first := map[string]string{"amd64": "1", "arm64": "8"}[architecture]
	return strings.EqualFold(p.OS, runtime.GOOS) && architecture == runtime.GOARCH && (variant == "" || variant == first)
}

// chooseInstance returns what the library chooses. The error is fault.NotFound if that is nothing.
func chooseInstance(sys *types.SystemContext, raw []byte, mediaType string) (digest.Digest, error) {
	list, err := manifest.ListFromBlob(raw, mediaType)
	if err != nil {
		return "", fmt.Errorf("%w: %w", err, fault.Invalid)
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
