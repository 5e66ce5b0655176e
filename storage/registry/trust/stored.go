package trust

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/image"
	imagetransport "go.podman.io/image/v5/storage"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
)

// Stored keeps the signatures of images in a store across pulls. The library replaces the
// signatures of an image with those that come with a pull: a pull from a registry without
// signatures would remove those of another registry, and pods that need them could no longer use
// the image.
type Stored struct {
	Store  cstorage.Store
	Usable func() error // says why the store cannot be used now

	mu    sync.Mutex
	known map[string]*pulledSignatures // by image
}

// pulledSignatures are the signatures of an image that is being pulled.
type pulledSignatures struct {
	pulls int // under way
	of    signaturesOf
}

// signaturesOf are an image's signatures by manifest, in the form of Blobs.
type signaturesOf map[digest.Digest][][]byte

// sizesMember is the member of an image's metadata in which the library keeps the sizes
// of the signatures by manifest.
const sizesMember = "signatures-sizes"

// SignatureItem is the name of an image's item in which the library keeps the signatures of a
// manifest, one after the other.
func SignatureItem(manifest digest.Digest) string { return "signature-" + manifest.Encoded() }

// Begin notes the signatures that an image has before a pull, and returns the signatures that
// the pull must store with a manifest of the image. The caller must call End.
func (s *Stored) Begin(ctx context.Context, image string, manifest digest.Digest, pulled [][]byte) [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known == nil {
		s.known = map[string]*pulledSignatures{}
	}
	one := s.known[image]
	if one == nil {
		one = &pulledSignatures{of: signaturesOf{}}
		s.known[image] = one
	}
	one.pulls++
	one.of.note(s.read(ctx, image))
	one.of.note(signaturesOf{manifest: pulled})
	return one.of[manifest]
}

// Has reports whether a pull would leave the image's signatures as they are.
func (s *Stored) Has(ctx context.Context, image string, manifest digest.Digest, pulled [][]byte) bool {
	if len(pulled) == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	stored := s.read(ctx, image)[manifest]
	return slices.EqualFunc(Union(pulled, stored), stored, bytes.Equal)
}

// End restores the signatures that pulls have removed from the image. Pulls of the image that
// are under way will do so as well. Without any signatures it does not use the store.
func (s *Stored) End(ctx context.Context, image string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	one := s.known[image]
	if one.pulls--; one.pulls == 0 {
		delete(s.known, image)
		if one.of.none() {
			return nil
		}
	}
	if err := s.Usable(); err != nil {
		return err
	}
	stored := s.read(ctx, image)
	one.of.note(stored)
	missing := signaturesOf{}
	for manifest, wanted := range one.of {
		if len(stored[manifest]) < len(wanted) {
			missing[manifest] = wanted
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return s.write(image, missing)
}

// note adds signatures to the known ones. The new ones come first, since they are for the
// name that was pulled last.
func (s signaturesOf) note(found signaturesOf) {
	for manifest, blobs := range found {
		s[manifest] = Union(blobs, s[manifest])
	}
}

// none reports whether there are no signatures.
func (s signaturesOf) none() bool {
	for _, blobs := range s {
		if len(blobs) > 0 {
			return false
		}
	}
	return true
}

// read returns the signatures of an image, without those that cannot be read.
func (s *Stored) read(ctx context.Context, id string) signaturesOf {
	record, err := s.Store.Image(id)
	if err != nil {
		return nil
	}
	_, sizes, err := readSizes(record)
	if err != nil {
		slog.WarnContext(ctx, "cannot read signatures of stored image", "image", id, "err", err)
		return nil
	}
	if !slices.ContainsFunc(slices.Collect(maps.Values(sizes)), func(list []int) bool { return len(list) > 0 }) {
		return nil
	}
	src, err := OpenStored(ctx, s.Store, record.ID)
	if err != nil {
		slog.WarnContext(ctx, "cannot read signatures of stored image", "image", id, "err", err)
		return nil
	}
	defer func() { _ = src.Close() }()
	found := signaturesOf{}
	for manifest, list := range sizes {
		if len(list) == 0 || manifest.Validate() != nil {
			continue
		}
		signatures, err := image.UnparsedInstance(src, &manifest).UntrustedSignatures(ctx)
		if err != nil {
			slog.WarnContext(ctx, "cannot read signatures of stored image", "image", id, "manifest", manifest, "err", err)
			continue
		}
		found[manifest], _ = Blobs(signatures)
	}
	return found
}

// write stores signatures of manifests, for those manifests that the image has.
func (s *Stored) write(id string, signatures signaturesOf) error {
	record, err := s.Store.Image(id)
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return nil
	}
	if err != nil {
		return err
	}
	metadata, sizes, err := readSizes(record)
	if err != nil {
		return err
	}
	for _, manifest := range slices.Sorted(maps.Keys(signatures)) {
		if !slices.Contains(record.Digests, manifest) {
			continue
		}
		sizes[manifest] = nil
		for _, blob := range signatures[manifest] {
			sizes[manifest] = append(sizes[manifest], len(blob))
		}
		if err := s.Store.SetImageBigData(record.ID, SignatureItem(manifest), bytes.Join(signatures[manifest], nil), nil); err != nil {
			return err
		}
	}
	if metadata[sizesMember], err = json.Marshal(sizes); err != nil {
		return err
	}
	text, err := json.Marshal(metadata)
	if err != nil {
		return err
	}
	return s.Store.SetMetadata(record.ID, string(text))
}

// readSizes reads the metadata that the library writes with an image.
func readSizes(record *cstorage.Image) (metadata map[string]json.RawMessage, sizes map[digest.Digest][]int, err error) {
	metadata, sizes = map[string]json.RawMessage{}, map[digest.Digest][]int{}
	if record.Metadata == "" {
		return metadata, sizes, nil
	}
	err = json.Unmarshal([]byte(record.Metadata), &metadata)
	if list, ok := metadata[sizesMember]; ok && err == nil {
		err = json.Unmarshal(list, &sizes)
	}
	if err != nil {
		err = fmt.Errorf("metadata of image %s: %w", record.ID, err)
	}
	return metadata, sizes, err
}

// UnderWay returns how many images are between Begin and End.
func (s *Stored) UnderWay() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.known)
}

// OpenStored opens an image of the store by its id.
func OpenStored(ctx context.Context, store cstorage.Store, id string) (types.ImageSource, error) {
	ref, err := imagetransport.Transport.NewStoreReference(store, nil, id)
	if err != nil {
		return nil, err
	}
	return ref.NewImageSource(ctx, nil)
}
