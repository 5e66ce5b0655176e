package storage

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

	"github.com/crius-run/crius/storage/registry/trust"
)

// signatureStore keeps what the library loses: a pull replaces the signatures that an
// image has. Whoever pulls an image from a registry that has no signatures for it would
// take away those of another registry, and with them the image from all who need them.
type signatureStore struct {
	store cstorage.Store

	mu    sync.Mutex
	known map[string]*pulledSignatures // by image
}

// pulledSignatures are those of an image that is being pulled.
type pulledSignatures struct {
	pulls int // under way
	of    signaturesOf
}

// signaturesOf are an image's signatures by manifest, in the form of trust.Blobs.
type signaturesOf map[digest.Digest][][]byte

// sizesMember is the member of an image's metadata in which the library has the sizes
// of the signatures by manifest. The item of a manifest has the signatures, one after
// the other.
const sizesMember = "signatures-sizes"

func signatureItem(manifest digest.Digest) string { return "signature-" + manifest.Encoded() }

// begin notes the signatures that an image has before a pull, and returns those that
// the pull is to store with a manifest of it. The caller must call end.
func (s *signatureStore) begin(ctx context.Context, image string, manifest digest.Digest, pulled [][]byte) [][]byte {
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

// has tells whether a pull would leave the image's signatures as they are.
func (s *signatureStore) has(ctx context.Context, image string, manifest digest.Digest, pulled [][]byte) bool {
	if len(pulled) == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	stored := s.read(ctx, image)[manifest]
	return slices.EqualFunc(trust.Union(pulled, stored), stored, bytes.Equal)
}

// end gives the image back what pulls have taken. Pulls of it that are under way will
// do so too.
func (s *signatureStore) end(ctx context.Context, image string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	one := s.known[image]
	if one.pulls--; one.pulls == 0 {
		delete(s.known, image)
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

// note adds signatures to those that are known: the new ones come first, since they
// are for the name that was pulled last.
func (s signaturesOf) note(found signaturesOf) {
	for manifest, blobs := range found {
		s[manifest] = trust.Union(blobs, s[manifest])
	}
}

// read returns the signatures of an image. Those that cannot be read are as good as
// none.
func (s *signatureStore) read(ctx context.Context, id string) signaturesOf {
	record, err := s.store.Image(id)
	if err != nil {
		return nil
	}
	_, sizes, err := readSizes(record)
	if err != nil {
		slog.WarnContext(ctx, "cannot read signatures of stored image", "image", id, "err", err)
		return nil
	}
	src, err := openStored(ctx, s.store, record.ID)
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
		found[manifest], _ = trust.Blobs(signatures)
	}
	return found
}

// write stores the signatures of manifests that the image has.
func (s *signatureStore) write(id string, signatures signaturesOf) error {
	record, err := s.store.Image(id)
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
		if err := s.store.SetImageBigData(record.ID, signatureItem(manifest), bytes.Join(signatures[manifest], nil), nil); err != nil {
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
	return s.store.SetMetadata(record.ID, string(text))
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

// openStored opens an image of the store by its id.
func openStored(ctx context.Context, store cstorage.Store, id string) (types.ImageSource, error) {
	ref, err := imagetransport.Transport.NewStoreReference(store, nil, id)
	if err != nil {
		return nil, err
	}
	return ref.NewImageSource(ctx, nil)
}
