package pull

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

// present remembers the images that this process has pulled and synced. A pull that finds
// its image unchanged has nothing to write, which is most pulls of a node whose pods have
// the pull policy Always.
type present struct {
	mu     sync.Mutex
	synced map[string]fingerprint // by image
}

// fingerprint is a digest of an image's record and of its top layer's id and time. A layer can be
// deleted only after those above it, so an image of which any was deleted and pulled again has another.
type fingerprint [sha256.Size]byte

func fingerprintOf(store cstorage.Store, record *cstorage.Image) (fingerprint, error) {
	hash := sha256.New()
	to := json.NewEncoder(hash)
	if err := to.Encode(record); err != nil {
		return fingerprint{}, err
	}
	if record.TopLayer != "" {
		layer, err := store.Layer(record.TopLayer)
		if err != nil {
			return fingerprint{}, err
		}
		if err := to.Encode([]any{layer.ID, layer.Created}); err != nil {
			return fingerprint{}, err
		}
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

// isPresent reports whether a pull of the image would change nothing: the store has it under
// this name, with these manifests and signatures, whole, and as it was when the manifest
// of the store was written. record is that of the image in the store, or nil.
func (p *Puller) isPresent(ctx context.Context, src *source.Image, record *cstorage.Image) bool {
	if record == nil {
		return false
	}
	id := record.ID
	now, err := fingerprintOf(p.Library, record)
	if err != nil || !p.present.is(id, now) || record.Digest != src.Manifest() || !slices.Contains(record.Names, src.Name.String()) {
		return false
	}
	for m := range src.All() {
		if !slices.Contains(record.Digests, digest.FromBytes(m.Content)) {
			return false
		}
	}
	// Lost records of layers below the top one are noticed by containers, which have the image forgotten.
	_, err = durable.UsableLayers(p.Library, record.TopLayer)
	return err == nil && p.Signatures.Has(ctx, id, src.Manifest(), src.Signatures)
}

// record returns what the store says of an image, or nil if it is new.
func (p *Puller) record(src *source.Image) *cstorage.Image {
	if src.ImageID() == "" { // nobody knows
		return nil
	}
	record, err := p.Library.Image(src.ImageID())
	if err != nil {
		return nil
	}
	return record
}

// storedConfig returns an image's config, or nil unless it is stored and whole.
func storedConfig(store cstorage.Store, config digest.Digest) []byte {
	content, err := store.ImageBigData(config.Encoded(), config.String())
	if err != nil || config.Algorithm().FromBytes(content) != config {
		return nil
	}
	return content
}
