package storage

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"slices"
	"sync"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/registry/source"
)

// present are the images that this process has pulled and synced. A pull that finds
// its image to be the same has nothing to write: nodes whose pods have the pull policy
// Always pull what they have most of the time.
type present struct {
	mu     sync.Mutex
	synced map[string]fingerprint // by image
}

// fingerprint is that of an image's record and of its layers. Layers have the time at
// which they were made, so one that was deleted and pulled again is another one.
type fingerprint [sha256.Size]byte

func fingerprintOf(store cstorage.Store, record *cstorage.Image) (fingerprint, error) {
	hash := sha256.New()
	to := json.NewEncoder(hash)
	if err := to.Encode(record); err != nil {
		return fingerprint{}, err
	}
	for id := record.TopLayer; id != ""; {
		layer, err := store.Layer(id)
		if err != nil {
			return fingerprint{}, err
		}
		if err := to.Encode([]any{layer.ID, layer.Created}); err != nil {
			return fingerprint{}, err
		}
		id = layer.Parent
	}
	return fingerprint(hash.Sum(nil)), nil
}

// note remembers an image that is synced.
func (p *present) note(id string, as fingerprint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.synced == nil {
		p.synced = map[string]fingerprint{}
	}
	p.synced[id] = as
}

func (p *present) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.synced, id)
}

func (p *present) is(id string, as fingerprint) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.synced[id] == as
}

// isPresent tells whether a pull of the image would change nothing: it is here under
// this name and with these manifests and signatures, whole, and as it was when the
// manifest of the store was written.
func (s *Store) isPresent(ctx context.Context, src *source.Image) bool {
	id := src.ImageID()
	if id == "" {
		return false
	}
	record, err := s.store.Image(id)
	if err != nil {
		return false
	}
	now, err := fingerprintOf(s.store, record)
	if err != nil || !s.present.is(id, now) || record.Digest != src.Manifest() || !slices.Contains(record.Names, src.Name.String()) {
		return false
	}
	for _, m := range src.Manifests {
		if !slices.Contains(record.Digests, digest.FromBytes(m.Content)) {
			return false
		}
	}
	return durable.ImageUsable(s.store, id) == nil && s.signatures.Has(ctx, id, src.Manifest(), src.Signatures)
}

// storedConfig is an image's config, nil unless it is stored and whole.
func storedConfig(store cstorage.Store, config digest.Digest) []byte {
	content, err := store.ImageBigData(config.Encoded(), config.String())
	if err != nil || config.Algorithm().FromBytes(content) != config {
		return nil
	}
	return content
}
