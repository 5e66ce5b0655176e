package storage

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

const (
	transport    = "docker://" // the only one that a reference may name
	maxReference = 4096        // bytes; a valid one is much shorter
	minIDPrefix  = 3           // digits that people may give of an id; fewer would match by accident
)

// localTransports are those of containers/image that would read files of the
// node. Some are valid docker references as well, so they are named here.
var localTransports = regexp.MustCompile(`^(containers-storage|docker-archive|docker-daemon|oci-archive):`)

// parseReference checks an image reference as it comes from a request and
// strips its transport. What it returns parses as a docker reference, possibly
// a short one.
func parseReference(ref string) (string, error) {
	if len(ref) > maxReference {
		return "", fmt.Errorf("image reference has %d bytes, at most %d are allowed: %w", len(ref), maxReference, fault.Invalid)
	}
	name := strings.TrimPrefix(ref, transport)
	if _, isID := wholeID(name); isID {
		return "", fmt.Errorf("image reference %q: it is an image ID, which no registry knows; give a name with tag or digest: %w", ref, fault.Invalid)
	}
	if strings.Contains(name, "://") || localTransports.MatchString(name) {
		return "", fmt.Errorf("image reference %q: images come from registries only; give a name without a transport or with %s: %w", ref, transport, fault.Invalid)
	}
	if _, err := normalize(name); err != nil {
		return "", err
	}
	return name, nil
}

// pullNames are the full names to try for a checked reference.
func pullNames(sys *types.SystemContext, name string) ([]reference.Named, error) {
	names, err := fullNames(sys, name)
	if err != nil {
		return nil, err
	}
	mode, err := sysregistriesv2.GetShortNameMode(sys)
	if err != nil {
		return nil, registriesError(err)
	}
	if len(names) > 1 && mode == types.ShortNameModeEnforcing {
		return nil, fmt.Errorf("image reference %q is ambiguous (%s) and registries.conf enforces unambiguous short names; "+
			"use the fully qualified name: %w", name, names, fault.Invalid)
	}
	return names, nil
}

// localNames are the full names under which a checked reference may be here
// already: a short one also under localhost, where buildah puts what it builds.
func localNames(sys *types.SystemContext, name string) ([]reference.Named, error) {
	names, err := fullNames(sys, name)
	if err != nil || !isShort(name) {
		return names, err
	}
	local, err := normalize("localhost/" + name)
	return append(names, local), err
}

// fullNames are the full names that a checked reference may stand for, in the
// order in which to try them. Short names follow registries.conf: an alias,
// else the unqualified-search-registries; where there are none, docker.io,
// which is what Kubernetes means by a name without a registry.
func fullNames(sys *types.SystemContext, name string) ([]reference.Named, error) {
	if !isShort(name) {
		named, err := normalize(name)
		return []reference.Named{named}, err
	}
	repository := name[:len(name)-len(suffix(name))]
	alias, _, err := sysregistriesv2.ResolveShortNameAlias(sys, repository)
	if err != nil {
		return nil, registriesError(err)
	}
	if alias != nil {
		named, err := normalize(alias.Name() + suffix(name))
		return []reference.Named{named}, err
	}
	registries, err := sysregistriesv2.UnqualifiedSearchRegistries(sys)
	if err != nil {
		return nil, registriesError(err)
	}
	if len(registries) == 0 {
		registries = []string{"docker.io"}
	}
	var names []reference.Named
	for _, registry := range registries {
		named, err := normalize(registry + "/" + name)
		if err != nil {
			return nil, err
		}
		names = append(names, named)
	}
	return names, nil
}

// isShort tells whether a checked reference lacks a registry.
func isShort(name string) bool {
	registry, _, found := strings.Cut(name, "/")
	return !found || registry != "localhost" && !strings.ContainsAny(registry, ".:")
}

// suffix is the tag and digest of a short name, with their separators.
func suffix(name string) string {
	if i := strings.IndexAny(name, ":@"); i >= 0 { // a short name has no port
		return name[i:]
	}
	return ""
}

func normalize(name string) (reference.Named, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return nil, fmt.Errorf("image reference %q: %w: %w", name, err, fault.Invalid)
	}
	return complete(named), nil
}

// complete adds the tag latest where there is neither tag nor digest, and
// drops the tag where there are both, as the digest says it all.
func complete(named reference.Named) reference.Named {
	if digested, ok := named.(reference.Canonical); ok {
		exact, err := reference.WithDigest(reference.TrimNamed(named), digested.Digest())
		if err == nil { // both parts come from a valid reference
			return exact
		}
	}
	return reference.TagNameOnly(named)
}

func registriesError(err error) error {
	return fmt.Errorf("registries.conf: %w: %w", err, fault.Precondition)
}

// wholeID returns the id that a reference is. That may have "sha256:" before its 64 digits
// and is never taken for a name, so that it means this content or nothing.
func wholeID(ref string) (id string, ok bool) {
	id = strings.TrimPrefix(ref, digest.SHA256.String()+":")
	return id, len(id) == digest.SHA256.Size()*2 && hexadecimal.MatchString(id)
}

// find returns the image of images that a request means by ref: a whole id or a name, of
// which names returns the full ones. The authors of pods write such references, so the
// beginning of an id is none: a few digits, tried one after the other, would name each image
// of the node.
func find(images []*Image, ref string, names func(string) ([]reference.Named, error)) (*Image, error) {
	if id, ok := wholeID(ref); ok {
		if image := byID(images, id); image != nil {
			return image, nil
		}
		return nil, errNotStored
	}
	name, err := parseReference(ref)
	if err != nil {
		return nil, err
	}
	full, err := names(name)
	if err != nil {
		return nil, err
	}
	if image := byName(images, full); image != nil {
		return image, nil
	}
	if hexadecimal.MatchString(strings.TrimPrefix(ref, digest.SHA256.String()+":")) {
		return nil, fmt.Errorf("no image of this name is in the store, pull it first; an image ID has 64 digits: %w", fault.NotFound)
	}
	return nil, errNotStored
}

var errNotStored = fmt.Errorf("it is not in the store, pull it first: %w", fault.NotFound)

// lookUp is find for references that people type: the unique beginning of an id, without
// "sha256:", is enough. Names go before beginnings, so that nobody can make an image whose
// id starts with somebody's short name.
//
// A kubelet never sends such a beginning: it adds a tag to what has neither tag nor digest,
// and refuses 64 digits alone.
func lookUp(images []*Image, ref string, names func(string) ([]reference.Named, error)) (*Image, error) {
	image, err := find(images, ref, names)
	if !errors.Is(err, fault.NotFound) || len(ref) < minIDPrefix || !hexadecimal.MatchString(ref) {
		return image, err
	}
	switch found, ambiguous := byPrefix(images, ref); {
	case ambiguous != nil:
		return nil, ambiguous
	case found != nil:
		return found, nil
	}
	return nil, err
}

var hexadecimal = regexp.MustCompile(`^[0-9a-f]{1,64}$`)

func byID(images []*Image, id string) *Image {
	i, ok := slices.BinarySearchFunc(images, id, func(image *Image, id string) int { return strings.Compare(image.ID, id) })
	if !ok {
		return nil
	}
	return images[i]
}

func byName(images []*Image, names []reference.Named) *Image {
	for _, name := range names {
		for _, image := range images {
			if slices.Contains(image.RepoTags, name.String()) || slices.Contains(image.RepoDigests, name.String()) {
				return image
			}
		}
	}
	return nil
}

func byPrefix(images []*Image, prefix string) (*Image, error) {
	var found *Image
	for _, image := range images {
		if !strings.HasPrefix(image.ID, prefix) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("image ID prefix %s is ambiguous; use more digits: %w", prefix, fault.Invalid)
		}
		found = image
	}
	return found, nil
}
