package storage

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry"
)

// minIDPrefix is how many digits of an id people must give; fewer would match by accident.
const minIDPrefix = 3

// find returns the image to which ref, from a request, refers: ref is a whole id, or a name, for
// which names returns the full names. The authors of pods write such references, so ref may not
// be the beginning of an id: a few digits, tried one after the other, would name each image of the
// node.
func find(images []*Image, ref string, names func(string) ([]reference.Named, error)) (*Image, error) {
	if id, ok := registry.WholeID(ref); ok {
		if image := byID(images, id); image != nil {
			return image, nil
		}
		return nil, errNotStored
	}
	name, err := registry.ParseReference(ref)
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
// "sha256:", is enough. Names take precedence, so that nobody can make an image whose id
// starts with somebody's short name.
//
// A kubelet never sends such a beginning: it adds a tag to a reference without tag and
// digest, and refuses 64 digits alone.
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
	for _, named := range names {
		name := named.String()
		for _, image := range images {
			if slices.Contains(image.RepoTags, name) || slices.Contains(image.RepoDigests, name) {
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
