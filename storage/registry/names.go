package registry

import (
	"errors"
	"fmt"
	"regexp"
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
)

// localTransports are the transports of containers/image that would read files of the
// node. Some are valid docker references as well, so they are named here.
var localTransports = regexp.MustCompile(`^(containers-storage|docker-archive|docker-daemon|oci-archive):`)

// ParseReference checks an image reference as it comes from a request and
// strips its transport. The result parses as a docker reference, possibly a
// short one. The error is fault.Invalid.
func ParseReference(ref string) (string, error) {
	if len(ref) > maxReference {
		return "", fmt.Errorf("image reference has %d bytes, at most %d are allowed: %w", len(ref), maxReference, fault.Invalid)
	}
	name := strings.TrimPrefix(ref, transport)
	if _, isID := WholeID(name); isID {
		return "", fmt.Errorf("image reference %q: it is an image ID, which no registry knows; give a name with tag or digest: %w", ref, fault.Invalid)
	}
	if strings.Contains(name, "://") || localTransports.MatchString(name) {
		return "", fmt.Errorf("image reference %q: images come from registries only; give a name without a transport or with %s: %w", ref, transport, fault.Invalid)
	}
	if strings.HasPrefix(name, "[") {
		return "", fmt.Errorf("image reference %q: an IPv6 address cannot be a registry: use a name, such as one in /etc/hosts: %w", ref, fault.Invalid)
	}
	if _, err := normalize(name); err != nil {
		return "", err
	}
	return name, nil
}

// PullNames returns the full names to try for a checked reference, in this order.
func PullNames(sys *types.SystemContext, name string) ([]reference.Named, error) {
	names, err := fullNames(sys, name)
	if err != nil {
		return nil, err
	}
	mode, err := sysregistriesv2.GetShortNameMode(sys)
	if err != nil {
		return nil, registriesError(err)
	}
	if len(names) > 1 && mode == types.ShortNameModeEnforcing {
		return nil, fmt.Errorf("image reference %q is ambiguous (%s), and image.short_name_mode or short-name-mode of registries.conf enforces unambiguous short names; "+
			"use the fully qualified name: %w", name, names, fault.Invalid)
	}
	return names, nil
}

// LocalNames returns the full names under which the store may have the image of a
// checked reference: for a short one also the name under localhost, where buildah
// puts the images that it builds.
func LocalNames(sys *types.SystemContext, name string) ([]reference.Named, error) {
	names, err := fullNames(sys, name)
	if err != nil || !isShort(name) {
		return names, err
	}
	local, err := normalize("localhost/" + name)
	return append(names, local), err
}

// fullNames returns the full names that a checked reference may stand for, in the
// order in which to try them. Short names follow registries.conf: an alias,
// else the unqualified-search-registries; where there are none, docker.io,
// as Kubernetes understands a name without a registry.
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

// isShort reports whether a checked reference lacks a registry.
func isShort(name string) bool {
	registry, _, found := strings.Cut(name, "/")
	return !found || registry != "localhost" && !strings.ContainsAny(registry, ".:")
}

// suffix returns the tag and digest of a short name, with their separators.
func suffix(name string) string {
	if i := strings.IndexAny(name, ":@"); i >= 0 { // a short name has no port
		return name[i:]
	}
	return ""
}

func normalize(name string) (reference.Named, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if host, _, _ := strings.Cut(name, "/"); !isShort(name) && strings.Contains(host, "_") { // which may look like a path
		err = errors.New("the name of a registry cannot have an underscore: use another name for it")
	}
	if exact, ok := named.(reference.Canonical); ok && exact.Digest().Algorithm() != digest.Canonical {
		err = fmt.Errorf("the digest of a manifest can only be by %s, not by %s", digest.Canonical, exact.Digest().Algorithm())
	}
	if err != nil {
		return nil, fmt.Errorf("image reference %q: %w: %w", name, err, fault.Invalid)
	}
	return complete(named), nil
}

// complete adds the tag latest to a name without tag and digest, and drops the
// tag beside a digest, which is more exact.
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

// WholeID returns the image id that a reference consists of: 64 digits, which "sha256:" may
// precede. Such a reference is never taken for a name, so that it means this content or nothing.
func WholeID(ref string) (id string, ok bool) {
	id = strings.TrimPrefix(ref, digest.SHA256.String()+":")
	return id, digits.MatchString(id)
}

var digits = regexp.MustCompile(`^[0-9a-f]{64}$`)
