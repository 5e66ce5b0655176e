package storage

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/pkg/blobinfocache/none"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/layers"
	"github.com/crius-run/crius/storage/progress"
	"github.com/crius-run/crius/storage/trust"
)

// Limits of what a registry may hand out; imageconfig.go has those of configs. The
// library itself bounds manifests to 4 MiB each.
const (
	maxInstances = 1000 // of an index
	maxLayers    = 500  // the most that overlay stacks
)

// source is an image in a registry, reached and inspected: a reference whose
// NewImageSource gives out what is open already.
type source struct {
	types.ImageReference
	opened *inspected
	name   reference.Named
}

// openSource reaches the first of the name's mirrors, or the registry itself,
// that has the image, and inspects it. It gives up where nothing comes.
func (s *Store) openSource(ctx context.Context, sys *types.SystemContext, policy *trust.Policy, name reference.Named) (*source, error) {
	ref, err := docker.NewReference(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	if s.cfg.ProgressTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, s.cfg.ProgressTimeout, progress.ErrStalled)
		defer cancel()
	}
	opened, err := ref.NewImageSource(ctx, sys)
	if err != nil {
		return nil, progress.CauseOf(ctx, err)
	}
	seen := &inspected{ImageSource: opened, documents: documents{Manifests: map[digest.Digest]document{}}, stored: s.storedConfig}
	if err := seen.inspect(ctx, sys, policy); err != nil {
		_ = opened.Close()
		return nil, progress.CauseOf(ctx, err)
	}
	return &source{ImageReference: ref, opened: seen, name: name}, nil
}

// NewImageSource implements types.ImageReference.
func (s *source) NewImageSource(context.Context, *types.SystemContext) (types.ImageSource, error) {
	return s.opened, nil
}

// inspected is an image source whose documents have passed inspect. The copy
// that follows gets them from memory: the registry is asked nothing twice and
// cannot answer differently the second time.
//
// The library shows only simple signatures of a source that is wrapped like this
// one, so inspect evaluates the signature policy on the source itself and keeps all
// signatures for the store (trust.Blobs).
type inspected struct {
	types.ImageSource
	documents
	signatures [][]byte

	stored      func(config digest.Digest) []byte // nil if there is none
	presentOnly bool                              // layers are refused with errLayerWanted

	largeWindows chan struct{} // takes the one pull that may have large windows
	mu           sync.Mutex
	large        bool // that pull is this one

	answers   atomic.Int64 // of the registry, under way
	expansion expansion    // of layers
}

// asked tells whether the registry has been asked for something that it has not
// sent, nor refused.
func (s *inspected) asked() bool { return s.answers.Load() > 0 }

// documents are what an image consists of but for its layers.
type documents struct {
	Manifests    map[digest.Digest]document // "": what the image's name refers to
	Config       []byte
	ConfigDigest digest.Digest // empty: the image has no config
}

// imageID is that of the image in the store; empty: it is not known.
func (d *documents) imageID() string {
	if d.ConfigDigest == "" {
		return ""
	}
	return d.ConfigDigest.Encoded()
}

type document struct {
	Content   []byte
	MediaType string
}

// GetManifest implements types.ImageSource.
func (d *documents) GetManifest(_ context.Context, instance *digest.Digest) ([]byte, string, error) {
	var wanted digest.Digest
	if instance != nil {
		wanted = *instance
	}
	m, ok := d.Manifests[wanted]
	if !ok {
		return nil, "", fmt.Errorf("image manifest %s: it was not inspected: %w", wanted, fault.Invalid)
	}
	return m.Content, m.MediaType, nil
}

// config is the config's content, if that is the blob with this digest.
func (d *documents) config(blob digest.Digest) (content io.ReadCloser, size int64, found bool) {
	if blob != d.ConfigDigest {
		return nil, 0, false
	}
	return io.NopCloser(bytes.NewReader(d.Config)), int64(len(d.Config)), true
}

// manifest is the digest of the manifest of this platform's image.
func (d *documents) manifest() digest.Digest {
	for instance := range d.Manifests {
		if instance != "" {
			return instance
		}
	}
	return digest.FromBytes(d.Manifests[""].Content)
}

// layers are the image's layers from the lowest one up; none if one of them or the
// manifest is in a format that only containers/image knows.
func (d *documents) layers() []layers.Layer {
	document, found := d.Manifests[d.manifest()]
	if !found {
		document = d.Manifests[""]
	}
	parsed, err := manifest.FromBlob(document.Content, document.MediaType)
	var config imagespec.Image
	if err != nil || json.Unmarshal(d.Config, &config) != nil {
		return nil
	}
	blobs, contents := parsed.LayerInfos(), config.RootFS.DiffIDs
	if len(blobs) != len(contents) {
		return nil
	}
	var list []layers.Layer
	for i, blob := range blobs {
		l := layers.Layer{Blob: blob.Digest, Size: blob.Size, DiffID: contents[i]}
		if !layerFormats[blob.MediaType] || l.Blob.Algorithm() != digest.Canonical || contents[i].Validate() != nil || l.DiffID.Algorithm() != digest.Canonical {
			return nil
		}
		list = append(list, l)
	}
	return list
}

// layerFormats are the media types of layers that are archives, compressed or not. Others
// are encrypted, or no layers.
var layerFormats = map[string]bool{
	imagespec.MediaTypeImageLayer:                     true,
	imagespec.MediaTypeImageLayerGzip:                 true,
	imagespec.MediaTypeImageLayerZstd:                 true,
	manifest.DockerV2Schema2LayerMediaType:            true,
	manifest.DockerV2SchemaLayerMediaTypeUncompressed: true,
	manifest.DockerV2SchemaLayerMediaTypeZstd:         true,
}

// errLayerWanted: the image is not present as a whole.
var errLayerWanted = errors.New("a layer is not present")

// GetManifest implements types.ImageSource.
func (s *inspected) GetManifest(ctx context.Context, instance *digest.Digest) ([]byte, string, error) {
	return s.documents.GetManifest(ctx, instance)
}

// GetSignatures implements types.ImageSource.
func (s *inspected) GetSignatures(context.Context, *digest.Digest) ([][]byte, error) {
	return s.signatures, nil
}

// GetBlob implements types.ImageSource.
func (s *inspected) GetBlob(ctx context.Context, info types.BlobInfo, cache types.BlobInfoCache) (io.ReadCloser, int64, error) {
	if content, size, found := s.config(info.Digest); found {
		return content, size, nil
	}
	if s.presentOnly {
		return nil, 0, errLayerWanted
	}
	s.answers.Add(1)
	stream, size, err := s.ImageSource.GetBlob(ctx, info, cache)
	s.answers.Add(-1)
	if err != nil {
		return nil, 0, err
	}
	guard := &layerGuard{
		ReadCloser: stream, layer: info.Digest, answers: &s.answers, expansion: &s.expansion, left: math.MaxInt64,
		admitLarge: func() error { return s.admitLarge(ctx) },
	}
	if info.Size > 0 {
		guard.left = info.Size
	}
	return guard, size, nil
}

// admitLarge waits until no other pull has layers with large windows: then all of
// this one may have some, until it ends.
func (s *inspected) admitLarge(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.large {
		return nil
	}
	select {
	case s.largeWindows <- struct{}{}:
		s.large = true
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// end lets other pulls have large windows, after the copy has ended.
func (s *inspected) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.large {
		s.large = false
		<-s.largeWindows
	}
}

// readConfig fetches the image's config, unless it is stored, and checks it.
func (s *inspected) readConfig(ctx context.Context, info types.BlobInfo) error {
	if info.Size > maxConfig {
		return fmt.Errorf("image config: it has %d bytes, more than %d: %w", info.Size, maxConfig, fault.Invalid)
	}
	raw := s.stored(info.Digest)
	if raw == nil {
		stream, _, err := s.ImageSource.GetBlob(ctx, info, none.NoCache)
		if err != nil {
			return fmt.Errorf("image config: %w", err)
		}
		defer stream.Close()
		if raw, err = io.ReadAll(io.LimitReader(stream, maxConfig+1)); err != nil {
			return fmt.Errorf("image config: %w", err)
		}
	}
	if err := checkConfig(raw); err != nil {
		return err
	}
	if got := info.Digest.Algorithm().FromBytes(raw); got != info.Digest {
		return fmt.Errorf("image config: its digest is %s, not %s", got, info.Digest)
	}
	s.Config, s.ConfigDigest = raw, info.Digest
	return nil
}

// inspect checks the manifest, and behind an index that of this platform's
// instance, before anything is fetched on its word; asks the signature policy; and
// checks the config.
func (s *inspected) inspect(ctx context.Context, sys *types.SystemContext, policy *trust.Policy) error {
	unparsed := image.UnparsedInstance(s.ImageSource, nil)
	raw, mediaType, err := unparsed.Manifest(ctx)
	if err != nil {
		return err
	}
	s.Manifests[""] = document{raw, mediaType}
	if manifest.MIMETypeIsMultiImage(mediaType) {
		chosen, err := chooseInstance(sys, raw, mediaType)
		if err != nil {
			return fmt.Errorf("image index: %w", err)
		}
		unparsed = image.UnparsedInstance(s.ImageSource, &chosen)
		raw, mediaType, err = unparsed.Manifest(ctx)
		if err != nil {
			return err
		}
		if manifest.MIMETypeIsMultiImage(mediaType) {
			return fmt.Errorf("image index: it refers to another index: %w", fault.Invalid)
		}
		s.Manifests[chosen] = document{raw, mediaType}
	}
	parsed, err := manifest.FromBlob(raw, mediaType)
	if err != nil {
		return fmt.Errorf("image manifest: %w: %w", err, fault.Invalid)
	}
	if err := inspectManifest(parsed); err != nil {
		return err
	}
	if err := s.readSignatures(ctx, unparsed); err != nil {
		return err
	}
	if err := policy.Check(ctx, unparsed); err != nil {
		return err
	}
	if isSchema1(parsed) {
		return nil
	}
	return s.readConfig(ctx, parsed.ConfigInfo())
}

// readSignatures fetches the signatures, which the image then has.
func (s *inspected) readSignatures(ctx context.Context, image *image.UnparsedImage) error {
	found, err := image.UntrustedSignatures(ctx)
	if err != nil {
		return fmt.Errorf("read signatures: %w", err)
	}
	var dropped int
	if s.signatures, dropped = trust.Blobs(found); dropped > 0 {
		slog.WarnContext(ctx, "some image signatures not stored: too many, too large or in an unknown format", "image", s.Reference().DockerReference(), "signatures", dropped)
	}
	return nil
}

func chooseInstance(sys *types.SystemContext, raw []byte, mediaType string) (digest.Digest, error) {
	list, err := manifest.ListFromBlob(raw, mediaType)
	if err != nil {
		return "", fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	if n := len(list.Instances()); n > maxInstances {
		return "", fmt.Errorf("it lists %d images, more than %d: %w", n, maxInstances, fault.Invalid)
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

// inspectManifest refuses digests that are none (CVE-2024-3727), blobs that are
// to be fetched from servers of the image's choice (CVE-2020-15157), and more
// layers than can be mounted.
func inspectManifest(m manifest.Manifest) error {
	layers := m.LayerInfos()
	if len(layers) > maxLayers {
		return fmt.Errorf("image manifest: %d layers, more than %d: %w", len(layers), maxLayers, fault.Invalid)
	}
	if config := m.ConfigInfo(); !isSchema1(m) {
		if err := config.Digest.Validate(); err != nil {
			return fmt.Errorf("image manifest: config digest %q: %w: %w", config.Digest, err, fault.Invalid)
		}
		if len(config.URLs) > 0 {
			return fmt.Errorf("image manifest: the config would have to be fetched from the foreign URL %q, but crius fetches only from the image's registry: %w", config.URLs[0], fault.Invalid)
		}
	}
	for i, layer := range layers {
		if err := layer.Digest.Validate(); err != nil {
			return fmt.Errorf("image manifest: digest %q of layer %d: %w: %w", layer.Digest, i, err, fault.Invalid)
		}
		if layer.Size <= 0 && !isSchema1(m) {
			return fmt.Errorf("image manifest: layer %d has a size of %d: %w", i, layer.Size, fault.Invalid)
		}
		if len(layer.URLs) > 0 {
			return fmt.Errorf("image manifest: layer %d is a foreign layer from %q, but crius fetches only from the image's registry: %w", i, layer.URLs[0], fault.Invalid)
		}
	}
	return nil
}

// isSchema1: Docker's oldest format has no config and tells no sizes.
func isSchema1(m manifest.Manifest) bool {
	_, is := m.(*manifest.Schema1)
	return is
}
