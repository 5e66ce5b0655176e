// Package source reaches an image in a registry and inspects its documents before a layer is
// fetched. crius then copies exactly what was inspected, and guards each layer while it comes.
package source

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/decrypt"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// Limits of what a registry may hand out; config.go has the limits of configs. The library itself
// bounds manifests to 4 MiB each.
const (
	MaxInstances = 1000 // of an index
	MaxLayers    = 500  // the most that overlay stacks
)

// Open reaches an image at the registry of name or one of its mirrors, inspects it, and asks the
// signature policy about it. Stored returns an image config that need not be fetched, or nil. What
// the library reads for this image is written to dir, which must stay until the image is closed. plain reports
// whether a host that is no source of the image may be asked by plain HTTP, although a registry with TLS names it.
func Open(ctx context.Context, sys *types.SystemContext, policy *trust.Policy, name reference.Named, stored func(digest.Digest) []byte, dir string, plain func(host string) bool) (*Image, error) {
	ref, err := docker.NewReference(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	attached, err := takeAttachments(sys, ref, dir)
	if err != nil {
		return nil, err
	}
	sources, err := pullSources(sys, name)
	image := &Image{Name: name, Documents: Documents{Manifests: map[digest.Digest]Document{}}, attachments: attached, stored: stored, requests: follow(sys, name, plain)}
	image.mirrored = err != nil || len(sources) > 1
	image.open = func(ctx context.Context) (types.ImageSource, error) { return ref.NewImageSource(ctx, sys) }
	listening, end := image.requests.listen(ctx)
	image.ImageSource, err = image.open(listening)
	end()
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, image.Failed(err) // it has not asked all
	case err != nil:
		return nil, image.requests.failed(tooLarge(err))
	}
	image.requests.reached()
	if err := image.inspect(ctx, sys, policy); err != nil {
		_ = image.Close()
		return nil, image.Failed(err)
	}
	return image, nil
}

// openedReference is a reference to an Image that is already open.
type openedReference struct {
	types.ImageReference
	image *Image
}

// NewImageSource implements types.ImageReference.
func (r *openedReference) NewImageSource(context.Context, *types.SystemContext) (types.ImageSource, error) {
	return r.image, nil
}

// Opened returns a reference to the image, for Copy.
func (s *Image) Opened() types.ImageReference { return &openedReference{s.Reference(), s} }

// Image is an image source whose documents have passed inspect. The copy that follows gets them
// from memory: the registry is asked for nothing twice, and cannot answer differently the second
// time.
//
// The library shows only simple signatures of a source that is wrapped like this
// one, so inspect evaluates the signature policy on the source itself and keeps all
// signatures for the store (trust.Blobs).
type Image struct {
	types.ImageSource
	Documents
	Name       reference.Named // under which the image is pulled
	Signatures [][]byte        // in the form of trust.Blobs
	Files      []File          // of an artifact; empty: it is an image

	// PresentOnly makes GetBlob refuse layers with ErrLayerWanted.
	PresentOnly bool
	// LargeWindows has room for one pull: only the layers of that pull may have large windows.
	LargeWindows chan struct{}

	open     func(context.Context) (types.ImageSource, error) // another source of the image; nil: there is none
	renewing sync.Mutex
	renewed  types.ImageSource   // gives blobs instead of the first one
	former   []types.ImageSource // that gave them before

	requests    *requests
	mirrored    bool
	attachments *attachments // nil: crius reads none
	stored      func(config digest.Digest) []byte
	encrypted   map[digest.Digest]*decrypt.Layer // by blob

	mu    sync.Mutex
	large bool // this pull has taken LargeWindows

	waiting atomic.Int64 // layers that wait for LargeWindows
	waited  atomic.Bool  // a layer has stopped waiting

	answers   atomic.Int64 // of the registry, under way
	expansion expansion    // of layers
}

// Asked reports whether the registry owes an answer: it has neither sent nor refused what it was
// asked for.
func (s *Image) Asked() bool { return s.answers.Load() > 0 }

// Waited reports whether a layer is waiting for LargeWindows, or has waited since the last call.
func (s *Image) Waited() bool { return s.waiting.Load() > 0 || s.waited.Swap(false) }

// Documents are all of an image except its layers.
type Documents struct {
	Manifests    map[digest.Digest]Document // "": the one that the image's name refers to, or that Indexes lead to
	Indexes      []Document                 // that the library is not shown; see choose
	Config       []byte
	ConfigDigest digest.Digest // empty: the image has no config
}

// ImageID returns the id of the image in the store; empty: it is not known.
func (d *Documents) ImageID() string {
	if d.ConfigDigest == "" {
		return ""
	}
	return d.ConfigDigest.Encoded()
}

// Document is a manifest or an index.
type Document struct {
	Content   []byte
	MediaType string
}

// GetManifest implements types.ImageSource.
func (d *Documents) GetManifest(_ context.Context, instance *digest.Digest) ([]byte, string, error) {
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

// ConfigBlob returns the content of the config if blob is its digest.
func (d *Documents) ConfigBlob(blob digest.Digest) (content io.ReadCloser, size int64, found bool) {
	if blob != d.ConfigDigest {
		return nil, 0, false
	}
	return io.NopCloser(bytes.NewReader(d.Config)), int64(len(d.Config)), true
}

// Manifest returns the digest of the manifest of this platform's image.
func (d *Documents) Manifest() digest.Digest {
	for instance := range d.Manifests {
		if instance != "" {
			return instance
		}
	}
	return digest.FromBytes(d.Manifests[""].Content)
}

// All returns the manifest, and the indexes that led to it.
func (d *Documents) All() iter.Seq[Document] {
	return slices.Values(slices.AppendSeq(slices.Clone(d.Indexes), maps.Values(d.Manifests)))
}

// Digests returns the digests of the manifest and of the indexes that led to it, sorted.
func (d *Documents) Digests() (digests []digest.Digest) {
	for m := range d.All() {
		digests = append(digests, digest.FromBytes(m.Content))
	}
	slices.Sort(digests)
	return digests
}

// Blobs returns the digests of the image's config and layers, as its manifest names them.
func (d *Documents) Blobs() map[digest.Digest]bool {
	blobs := map[digest.Digest]bool{d.ConfigDigest: true}
	if parsed, err := d.parsed(); err == nil {
		for _, l := range parsed.LayerInfos() {
			blobs[l.Digest] = true
		}
	}
	return blobs
}

// LayerBytes returns the bytes of the layers as the registry has them; 0 if the manifest does not say.
func (d *Documents) LayerBytes() (total int64) {
	parsed, err := d.parsed()
	if err != nil {
		return 0
	}
	for _, blob := range parsed.LayerInfos() {
		total += max(blob.Size, 0)
	}
	return total
}

// LayerDigests returns the digests by which a copy of the image may find its layers in a store:
// digests of their blobs and, if the config has them, of their content, whatever their format.
func (d *Documents) LayerDigests() (digests []digest.Digest) {
	if parsed, err := d.parsed(); err == nil {
		for _, blob := range parsed.LayerInfos() {
			digests = append(digests, blob.Digest)
		}
	}
	return append(digests, contentsOf(d.Config)...)
}

// LayerIDs returns the ids that the image's layers get in a store, as far as the config says.
func (d *Documents) LayerIDs() []string {
	contents := contentsOf(d.Config)
	if slices.ContainsFunc(contents, func(d digest.Digest) bool { return d.Validate() != nil }) {
		return nil // no copy of it succeeds
	}
	return layers.IDs(contents)
}

// Document returns the manifest of this platform's image.
func (d *Documents) Document() Document {
	if document, inIndex := d.Manifests[d.Manifest()]; inIndex {
		return document
	}
	return d.Manifests[""]
}

// Descriptor describes the index or the manifest to which the name leads.
func (d *Documents) Descriptor() imagespec.Descriptor {
	top := d.Manifests[""]
	return imagespec.Descriptor{MediaType: top.MediaType, Digest: digest.FromBytes(top.Content), Size: int64(len(top.Content))}
}

func (d *Documents) parsed() (manifest.Manifest, error) {
	document := d.Document()
	return parse(document.Content, document.MediaType)
}

// Layers returns the image's layers from the lowest one up. It is empty if one of them, or the
// manifest, has a format that only containers/image knows.
func (d *Documents) Layers() []layers.Layer {
	parsed, err := d.parsed()
	if err != nil {
		return nil
	}
	blobs, contents := parsed.LayerInfos(), contentsOf(d.Config)
	if len(blobs) != len(contents) { // schema 1
		return nil
	}
	var list []layers.Layer
	for i, blob := range blobs {
		format, _ := decrypt.Plain(blob.MediaType)
		l := layers.Layer{Blob: blob.Digest, Size: blob.Size, DiffID: contents[i]}
		if !layerFormats[format] || l.Blob.Algorithm() != digest.Canonical || contents[i].Validate() != nil || l.DiffID.Algorithm() != digest.Canonical {
			return nil
		}
		list = append(list, l)
	}
	return list
}

// contentsOf returns the digests of the layers' contents that a config names.
func contentsOf(config []byte) []digest.Digest {
	var image struct {
		RootFS imagespec.RootFS `json:"rootfs"`
	}
	if json.Unmarshal(config, &image) != nil {
		return nil
	}
	return image.RootFS.DiffIDs
}

// layerFormats are the media types of layers that are archives, compressed or not.
var layerFormats = map[string]bool{
	imagespec.MediaTypeImageLayer:                     true,
	imagespec.MediaTypeImageLayerGzip:                 true,
	imagespec.MediaTypeImageLayerZstd:                 true,
	manifest.DockerV2Schema2LayerMediaType:            true,
	manifest.DockerV2SchemaLayerMediaTypeUncompressed: true,
	manifest.DockerV2SchemaLayerMediaTypeZstd:         true,
}

// ErrLayerWanted says that the image is not complete in the store.
var ErrLayerWanted = errors.New("a layer is not present")

// GetManifest implements types.ImageSource.
func (s *Image) GetManifest(ctx context.Context, instance *digest.Digest) ([]byte, string, error) {
	return s.Documents.GetManifest(ctx, instance)
}

// GetSignatures implements types.ImageSource.
func (s *Image) GetSignatures(context.Context, *digest.Digest) ([][]byte, error) {
	return s.Signatures, nil
}

// GetBlob implements types.ImageSource.
func (s *Image) GetBlob(ctx context.Context, info types.BlobInfo, cache types.BlobInfoCache) (io.ReadCloser, int64, error) {
	if content, size, found := s.ConfigBlob(info.Digest); found {
		return content, size, nil
	}
	if s.PresentOnly {
		return nil, 0, ErrLayerWanted
	}
	stream, size, err := s.fetch(ctx, info, cache)
	if err != nil {
		return nil, 0, err
	}
	return s.Guard(ctx, info, stream), size, nil
}

// Answer names an answer to a request for something that the manifest names, and the host that has given it if the
// registry has sent crius there.
func (s *Image) Answer() string { return answerOf(s.requests.sentOnForParts()) }

// Guard wraps a layer that comes from the registry: the result is guarded, and decrypted if the
// layer is encrypted.
func (s *Image) Guard(ctx context.Context, info types.BlobInfo, stream io.ReadCloser) io.ReadCloser {
	guard := &layerGuard{
		ReadCloser: s.decrypted(info.Digest, stream), layer: info.Digest, answers: &s.answers, expansion: &s.expansion, left: math.MaxInt64,
		admitLarge: func() error { return s.admitLarge(ctx) },
	}
	if info.Size > 0 {
		guard.left = info.Size
	}
	return guard
}

// admitLarge waits until no other pull has layers with large windows. From then on until End all
// layers of this pull may have them.
func (s *Image) admitLarge(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.large {
		return nil
	}
	s.waiting.Add(1)
	defer func() {
		s.waited.Store(true)
		s.waiting.Add(-1)
	}()
	wait := trace.Waiting{Name: "wait for other pull", For: "another pull whose layers need much memory", Patient: true}
	return trace.Wait(ctx, wait, func(ctx context.Context) error {
		select {
		case s.LargeWindows <- struct{}{}:
			s.large = true
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
}

// End releases LargeWindows to other pulls. It is called after the copy.
func (s *Image) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.large {
		s.large = false
		<-s.LargeWindows
	}
}

// readConfig fetches the image's config, unless it is stored, and checks it.
func (s *Image) readConfig(ctx context.Context, info types.BlobInfo) error {
	if s.ConfigDigest == info.Digest { // the config has decided which image of an index is taken
		return nil
	}
	if info.Size > MaxConfig {
		return fmt.Errorf("image config: it has %d bytes, more than %d; rebuild the image with fewer or shorter labels: %w", info.Size, MaxConfig, fault.Invalid)
	}
	raw := s.stored(info.Digest)
	if raw == nil {
		stream, err := s.config(ctx, info)
		if err != nil {
			return fmt.Errorf("image config: %w", err)
		}
		defer stream.Close()
		if raw, err = io.ReadAll(io.LimitReader(stream, MaxConfig+1)); err != nil {
			return fmt.Errorf("image config: %w", err)
		}
	}
	if got := info.Digest.Algorithm().FromBytes(raw); got != info.Digest {
		return fmt.Errorf("image config: %w", download.Differs(s.Answer(), raw, int64(len(raw)), fmt.Sprintf("its digest is %s, not %s", got, info.Digest)))
	}
	if err := CheckConfig(raw); err != nil {
		return err
	}
	if int64(len(raw)) != info.Size {
		return fmt.Errorf("image config: it has %d bytes, but the manifest says %d; rebuild the image: %w", len(raw), info.Size, fault.Invalid)
	}
	s.Config, s.ConfigDigest = raw, info.Digest
	return nil
}

// inspect checks the manifest, and behind an index the manifest of this platform, before anything
// that they name is fetched. Then it asks the signature policy and checks the config. Configs are read
// before that only if they decide which image of an index is for this platform.
func (s *Image) inspect(ctx context.Context, sys *types.SystemContext, policy *trust.Policy) error {
	unparsed := image.UnparsedInstance(s.ImageSource, nil)
	raw, mediaType, err := s.fetchManifest(ctx, nil)
	if err != nil {
		return err
	}
	s.Manifests[""] = Document{raw, mediaType}
	if manifest.MIMETypeIsMultiImage(mediaType) {
		if unparsed, err = s.choose(ctx, sys, Document{raw, mediaType}); err != nil {
			return err
		}
		document := s.Document()
		raw, mediaType = document.Content, document.MediaType
	}
	parsed, err := parse(raw, mediaType)
	if err != nil {
		return s.noManifest(raw, fmt.Errorf("image manifest: %w", misread(Document{raw, mediaType}, err)))
	}
	if err := inspectManifest(parsed); err != nil {
		return s.noManifest(raw, err)
	}
	signed, err := s.readSignatures(ctx, unparsed)
	if err != nil {
		return err
	}
	if err := policy.Check(ctx, signed); err != nil {
		return err
	}
	if isSchema1(parsed) {
		return nil
	}
	if isArtifact(parsed) {
		s.Files, err = FilesOf(raw)
		return err
	}
	if err := s.readConfig(ctx, parsed.ConfigInfo()); err != nil {
		return err
	}
	// The store identifies an image by its config. A manifest with other layers than the config
	// names would take the id of another image.
	blobs, contents := len(parsed.LayerInfos()), len(contentsOf(s.Config))
	switch {
	case blobs == contents:
		return s.checkKind(mediaType, parsed.ConfigInfo().MediaType)
	case hasArtifactType(parsed):
		s.Config, s.ConfigDigest = nil, ""
		s.Files, err = FilesOf(raw)
		return err
	}
	return fmt.Errorf("image manifest: it has %d layers, but its config names %d; it is broken or no container image: rebuild it, or correct the name: %w", blobs, contents, fault.Invalid)
}

// checkKind refuses what the library would refuse once the layers have been fetched: a config that is no image's,
// one of Docker behind a manifest of OCI, and digests by which the store keeps nothing.
func (s *Image) checkKind(manifestType, configType string) error {
	if manifestType == imagespec.MediaTypeImageManifest && configType == manifest.DockerV2Schema2ConfigMediaType {
		return fmt.Errorf("image manifest: it has OCI's type, and its config Docker's; rebuild the image with the types of one of them: %w", fault.Invalid)
	}
	var spec imagespec.Image
	if err := json.Unmarshal(s.Config, &spec); err != nil {
		return fmt.Errorf("image config: %w; rebuild the image: %w", err, fault.Invalid)
	}
	for _, d := range append(contentsOf(s.Config), s.ConfigDigest) {
		if d.Validate() == nil && d.Algorithm() != digest.Canonical {
			return fmt.Errorf("image config: digests of the config and of the contents of layers (diff_ids) can only be by %s, not by %s; rebuild the image: %w", digest.Canonical, d.Algorithm(), fault.Invalid)
		}
	}
	return nil
}

// readSignatures fetches the signatures into s.Signatures, and returns the image with them for the
// signature policy.
func (s *Image) readSignatures(ctx context.Context, image *image.UnparsedImage) (types.UnparsedImage, error) {
	s.requests.setApart(true)
	found, err := image.UntrustedSignatures(ctx)
	s.requests.setApart(false)
	switch {
	case err != nil && len(pullerror.Kinds(err)) == 0 && pullerror.StatusOf(err) == 0: // what came is no signature
		return nil, pullerror.Explained(fmt.Errorf("read signatures: %w; look at what answers where registries.d says that signatures are: %w", err, fault.Unavailable))
	case err != nil:
		return nil, fmt.Errorf("read signatures: %w", err)
	}
	blobs, dropped := trust.Blobs(found)
	s.Signatures = blobs
	signed, more, err := s.addAttachments(ctx, image)
	if err != nil {
		return nil, fmt.Errorf("read signatures attached to the image: %w", err)
	}
	if dropped += more; dropped > 0 {
		slog.WarnContext(ctx, "some image signatures not stored: too many, too large or in an unknown format", "image", s.Reference().DockerReference(), "signatures", dropped)
	}
	return signed, nil
}

// AllowExpansion lets the layers decompress to room bytes in total, or to what gzip could reach.
func (s *Image) AllowExpansion(room int64) { s.expansion.room = room }
