package remote

import (
	"archive/tar"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/pkg/blobinfocache/none"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/decrypt"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/source"
)

// Pull writes the checkpoint that ref names to dir, an empty directory that nobody else can write to. A key of keys
// must have signed it. A pull that fails leaves a part of it.
func Pull(ctx context.Context, a Access, ref string, keys []ed25519.PublicKey, dir string) error {
	at, err := a.find(ref)
	if err != nil {
		return err
	}
	policy, err := a.Policies.For("")
	if err != nil {
		return err
	}
	noConfig := func(digest.Digest) []byte { return nil }
	var src *source.Image
	err = a.unlessSilent(ctx, func(ctx context.Context, _ silence) (err error) {
		src, err = source.Open(ctx, at.sys, policy, at.name, noConfig, a.Dir, func(host string) bool { return registry.Insecure(at.sys, host) })
		return err
	})
	if err != nil {
		return at.failed("pull", err)
	}
	defer func() { _ = src.Close() }()
	if _, err := a.Verifiers.Check(ctx, at.name.String(), src.Descriptor()); err != nil {
		return at.failed("pull", err)
	}
	p := &puller{place: at, src: src, dir: dir, keys: keys, left: map[string]bool{}}
	if err := p.run(ctx); err != nil {
		return at.failed("pull", err)
	}
	return nil
}

// puller pulls one checkpoint.
type puller struct {
	place  *place
	src    *source.Image
	dir    string
	keys   []ed25519.PublicKey
	signed checkpoint.Signed
	left   map[string]bool // files that have not come

	encrypted map[string]*decrypt.Layer // by title
}

func (p *puller) run(ctx context.Context) error {
	layers, err := p.check()
	if err != nil {
		return err
	}
	if err := p.verify(ctx, layers); err != nil {
		return err
	}
	if err := p.checkLayers(layers); err != nil {
		return err
	}
	if err := p.unlock(ctx, layers); err != nil {
		return err
	}
	room, err := checkpoint.RoomIn(p.dir)
	if err != nil {
		return err
	}
	if err := checkpoint.CheckRoom(p.signed.Size(), room, room); err != nil { // the server copies it to the same disk
		return err
	}
	for _, f := range p.src.Files {
		layer, ok := layers[f.Path]
		if !ok { // a document
			continue
		}
		if err := p.fetch(ctx, f.Path, layer); err != nil {
			return err
		}
	}
	if missing := slices.Sorted(maps.Keys(p.left)); len(missing) > 0 {
		return fmt.Errorf("the artifact lacks %d files that its %s signs for, the first is %.100q: %w", len(missing), checkpoint.Manifest, missing[0], fault.Invalid)
	}
	return nil
}

// check returns the layers by title, if the artifact looks like a checkpoint.
func (p *puller) check() (map[string]imagespec.Descriptor, error) {
	var m imagespec.Manifest
	if len(p.src.Files) == 0 {
		return nil, fmt.Errorf("it is a container image, not a checkpoint: %w", fault.Invalid)
	}
	if err := json.Unmarshal(p.src.Document().Content, &m); err != nil {
		return nil, fmt.Errorf("artifact manifest: %w: %w", err, fault.Invalid)
	}
	if m.ArtifactType != ArtifactType {
		return nil, fmt.Errorf("it is an artifact of the type %.100q, not a checkpoint of a pod (%s): %w", m.ArtifactType, ArtifactType, fault.Invalid)
	}
	if len(m.Layers) != len(p.src.Files) {
		return nil, fmt.Errorf("artifact manifest: a layer has no title: %w", fault.Invalid)
	}
	layers := map[string]imagespec.Descriptor{}
	for i, layer := range m.Layers {
		title := layer.Annotations[imagespec.AnnotationTitle]
		if title != p.src.Files[i].Path { // which are unique
			return nil, fmt.Errorf("artifact manifest: layer %d has the title %.100q: %w", i, title, fault.Invalid)
		}
		layers[title] = layer
	}
	return layers, nil
}

// verify writes the manifest of the checkpoint and its signature, and verifies them.
func (p *puller) verify(ctx context.Context, layers map[string]imagespec.Descriptor) (err error) {
	texts := map[string][]byte{}
	for name, most := range map[string]int64{checkpoint.Manifest: checkpoint.MaxManifest, checkpoint.Signature: checkpoint.MaxSignature} {
		layer, ok := layers[name]
		switch {
		case !ok || layer.MediaType != documentLayer:
			return fmt.Errorf("the artifact has no layer %s of the type %s: %w", name, documentLayer, fault.Invalid)
		case layer.Size > most:
			return fmt.Errorf("%s has %d bytes, at most %d are allowed: %w", name, layer.Size, most, fault.Invalid)
		}
		err := p.blob(ctx, layer, func(from io.Reader) (err error) {
			texts[name], err = io.ReadAll(from)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(p.dir, name), texts[name], 0o600); err != nil {
			return err
		}
		delete(layers, name)
	}
	p.signed, err = checkpoint.ReadSigned(p.keys, texts[checkpoint.Manifest], texts[checkpoint.Signature])
	return err
}

// checkLayers refuses layers that the manifest of the checkpoint does not sign for, and such as are larger than what
// they should have can be.
func (p *puller) checkLayers(layers map[string]imagespec.Descriptor) error {
	inArchive := p.signed.Size()
	for _, f := range p.signed.Manifest.Files {
		p.left[f.Path] = true
	}
	inArchive += uint64(len(p.left)+1) * (4 << 10) // headers
	for title, layer := range layers {
		want, most := archiveLayer, inArchive
		if title != archiveTitle {
			name, compressed := strings.CutSuffix(title, suffix)
			f, known := p.signed.File(name)
			if !compressed || !known {
				return fmt.Errorf("the artifact has a layer %.100q, which its %s does not sign for: %w", title, checkpoint.Manifest, fault.Invalid)
			}
			want, most = fileLayer, uint64(f.Size)
		}
		if plain, _ := decrypt.Plain(layer.MediaType); plain != want {
			return fmt.Errorf("layer %.100q has the type %.100q, not %s: %w", title, layer.MediaType, want, fault.Invalid)
		}
		if most += most/64 + 64<<10; layer.Size < 0 || uint64(layer.Size) > most { // zstd adds less
			return fmt.Errorf("layer %.100q has %d bytes, more than %d: %w", title, layer.Size, most, fault.Invalid)
		}
	}
	return nil
}

// unlock decrypts the keys of encrypted layers.
func (p *puller) unlock(ctx context.Context, layers map[string]imagespec.Descriptor) error {
	var keys *decrypt.Keys
	p.encrypted = map[string]*decrypt.Layer{}
	for _, title := range slices.Sorted(maps.Keys(layers)) {
		layer := layers[title]
		if _, encrypted := decrypt.Plain(layer.MediaType); !encrypted {
			continue
		}
		var err error
		if keys == nil {
			if keys, err = p.place.Keys(); err != nil {
				return fmt.Errorf("the checkpoint is encrypted: %w", err)
			}
		}
		blob := types.BlobInfo{Digest: layer.Digest, Size: layer.Size, Annotations: layer.Annotations}
		if p.encrypted[title], err = keys.Layer(ctx, blob); err != nil {
			return fmt.Errorf("encrypted layer %.100q: %w", title, err)
		}
	}
	return nil
}

// fetch writes the files of a layer.
func (p *puller) fetch(ctx context.Context, title string, layer imagespec.Descriptor) error {
	err := p.blob(ctx, layer, func(from io.Reader) error {
		if encrypted := p.encrypted[title]; encrypted != nil {
			from = encrypted.Open(io.NopCloser(from))
		}
		z, err := zstd.NewReader(from, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window))
		if err != nil {
			return err
		}
		defer z.Close()
		if title == archiveTitle {
			return p.unpack(ctx, z)
		}
		return p.receive(ctx, strings.TrimSuffix(title, suffix), z)
	})
	if err != nil {
		return fmt.Errorf("layer %.100q: %w", title, err)
	}
	return nil
}

// unpack writes the files of an archive.
func (p *puller) unpack(ctx context.Context, from io.Reader) error {
	for archive := tar.NewReader(from); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			return fmt.Errorf("%.100q is not a regular file: %w", h.Name, fault.Invalid)
		}
		if err := p.receive(ctx, h.Name, archive); err != nil {
			return err
		}
	}
}

// receive writes a file, which must be signed for. It writes no more than the size that is signed for.
func (p *puller) receive(ctx context.Context, name string, from io.Reader) error {
	f, known := p.signed.File(name)
	switch {
	case !known:
		return fmt.Errorf("%s does not sign for %.100q: %w", checkpoint.Manifest, name, fault.Invalid)
	case !p.left[name]:
		return fmt.Errorf("the artifact has %.100q twice: %w", name, fault.Invalid)
	}
	at := filepath.Join(p.dir, name)
	if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
		return err
	}
	if err := f.Receive(ctx, at, from); err != nil {
		return err
	}
	delete(p.left, name)
	return nil
}

// blob has read read a layer, which must have the digest and the size in its descriptor.
func (p *puller) blob(ctx context.Context, layer imagespec.Descriptor, read func(io.Reader) error) error {
	return p.place.unlessSilent(ctx, func(ctx context.Context, s silence) error { return p.readBlob(ctx, s, layer, read) })
}

func (p *puller) readBlob(ctx context.Context, s silence, layer imagespec.Descriptor, read func(io.Reader) error) error {
	stream, _, err := p.src.ImageSource.GetBlob(ctx, types.BlobInfo{Digest: layer.Digest, Size: layer.Size, MediaType: layer.MediaType}, none.NoCache)
	if err != nil {
		return p.src.Failed(err)
	}
	s.end()
	defer stream.Close()
	digester := layer.Digest.Algorithm().Digester()
	from := &counted{Reader: io.TeeReader(io.LimitReader(received{s, stream}, layer.Size+1), digester.Hash())}
	readErr := read(from)
	if ctx.Err() != nil || fault.DiskFull(readErr) {
		return readErr
	}
	if _, err := io.Copy(io.Discard, from); err != nil { // the rest says whether the registry has sent something else
		return p.src.Failed(err)
	}
	var differs string
	switch got := digester.Digest(); {
	case from.size < layer.Size:
		differs = fmt.Sprintf("the registry sent %d of %d bytes", from.size, layer.Size)
	case from.size > layer.Size:
		differs = fmt.Sprintf("the registry sent more than %d bytes", layer.Size)
	case got != layer.Digest:
		differs = fmt.Sprintf("the registry sent content with another digest, %s", got)
	default:
		return readErr
	}
	return download.Differs(p.src.Answer(), from.head, from.size, differs)
}

// counted counts what is read.
type counted struct {
	io.Reader
	size int64
	head []byte // the first bytes
}

// Read implements io.Reader.
func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.size += int64(n)
	c.head = append(c.head, p[:min(n, pullerror.MaxHead-len(c.head))]...)
	return n, err
}
