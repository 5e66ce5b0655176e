package remote

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/blobinfocache/none"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/storage/registry/decrypt"
)

const (
	// largeFile is the size from which a file has a layer of its own, in bytes: the memory of processes and what
	// they have written. A process with many threads has a small file for each.
	largeFile = 1 << 20
	// maxLarge bounds these layers. Pulls refuse an artifact with more than 1000 layers.
	maxLarge = 900
)

// Pusher pushes one checkpoint.
type Pusher struct {
	place *place
	dest  types.ImageDestination
}

// NewPusher reaches the registry of ref, a tag, and uploads the config of the artifact, which is always the same: a
// registry that cannot be used refuses it, before a checkpoint is written. The caller must call Close.
func NewPusher(ctx context.Context, a Access, ref string) (*Pusher, error) {
	at, err := a.find(ref)
	if err != nil {
		return nil, err
	}
	if _, digested := at.name.(reference.Digested); digested {
		return nil, fmt.Errorf("%s has a digest, which the checkpoint does not have yet: give a tag: %w", at.name, fault.Invalid)
	}
	to, err := docker.NewReference(at.name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	p := &Pusher{place: at}
	err = a.unlessSilent(ctx, func(ctx context.Context, _ silence) (err error) {
		p.dest, err = to.NewImageDestination(ctx, at.sys)
		return err
	})
	if err != nil {
		return nil, at.failed("push", err)
	}
	if _, err := p.upload(ctx, imagespec.DescriptorEmptyJSON.Data, true); err != nil {
		p.Close()
		return nil, at.failed("push", err)
	}
	return p, nil
}

// Close ends the connection.
func (p *Pusher) Close() { _ = p.dest.Close() }

// Push pushes the files of a checkpoint, and then the artifact. It returns the name of the artifact by digest. A push
// that fails leaves no artifact, and blobs that the registry removes as it removes those of other interrupted pushes.
func (p *Pusher) Push(ctx context.Context, source *checkpoint.Source) (string, error) {
	m := imagespec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: imagespec.MediaTypeImageManifest, ArtifactType: ArtifactType,
		Config: imagespec.DescriptorEmptyJSON, Annotations: annotations(source),
	}
	m.Config.Data = nil
	layers, err := p.layers(ctx, source)
	if err != nil {
		return "", p.place.failed("push", err)
	}
	m.Layers = layers
	text, err := json.Marshal(m)
	if err == nil {
		err = p.place.unlessSilent(ctx, func(ctx context.Context, _ silence) error { return p.dest.PutManifest(ctx, text, nil) })
	}
	if err != nil {
		return "", p.place.failed("push", err)
	}
	named, err := reference.WithDigest(reference.TrimNamed(p.place.name), digest.FromBytes(text))
	if err != nil {
		return "", err
	}
	return named.String(), nil
}

// layers pushes the files.
func (p *Pusher) layers(ctx context.Context, source *checkpoint.Source) (all []imagespec.Descriptor, err error) {
	add := func(title, mediaType string, blob types.BlobInfo) {
		annotations := map[string]string{imagespec.AnnotationTitle: title}
		if len(blob.Annotations) > 0 {
			mediaType = decrypt.EncryptedType(mediaType)
			maps.Copy(annotations, blob.Annotations)
		}
		all = append(all, imagespec.Descriptor{MediaType: mediaType, Digest: blob.Digest, Size: blob.Size, Annotations: annotations})
	}
	for _, name := range []string{checkpoint.Manifest, checkpoint.Signature} {
		text, err := read(source, name)
		if err != nil {
			return nil, err
		}
		blob, err := p.upload(ctx, text, false)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		add(name, documentLayer, blob)
	}
	var small []checkpoint.File
	for _, f := range source.Manifest.Files {
		if f.Size < largeFile || len(all) >= maxLarge {
			small = append(small, f)
			continue
		}
		blob, err := p.compressed(ctx, func(to io.Writer) error { return copyFile(ctx, source, f, to) })
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Path, err)
		}
		add(f.Path+suffix, fileLayer, blob)
	}
	blob, err := p.compressed(ctx, func(to io.Writer) error { return archive(ctx, source, small, to) })
	if err != nil {
		return nil, err
	}
	add(archiveTitle, archiveLayer, blob)
	return all, nil
}

// upload uploads a small blob, unless the registry has it.
func (p *Pusher) upload(ctx context.Context, content []byte, isConfig bool) (types.BlobInfo, error) {
	info := types.BlobInfo{Digest: digest.FromBytes(content), Size: int64(len(content))}
	return p.put(ctx, bytes.NewReader(content), info, isConfig)
}

func (p *Pusher) put(ctx context.Context, from io.Reader, info types.BlobInfo, isConfig bool) (blob types.BlobInfo, err error) {
	err = p.place.unlessSilent(ctx, func(ctx context.Context, s silence) (err error) {
		blob, err = p.dest.PutBlob(ctx, sent{s, from}, info, none.NoCache, isConfig)
		return err
	})
	return blob, err
}

// compressed uploads what write writes, while it does so. The same content always has the same digest, unless it is
// encrypted. The annotations in what is returned are those of an encrypted layer.
func (p *Pusher) compressed(ctx context.Context, write func(io.Writer) error) (types.BlobInfo, error) {
	from, to := io.Pipe()
	written := make(chan error, 1)
	go func() {
		err := panics.Do(ctx, "compress checkpoint", func() error { return compress(to, write) })
		_ = to.CloseWithError(err)
		written <- err
	}()
	var stream io.Reader = from
	var encrypted *decrypt.Encrypted
	if p.place.Recipients != nil {
		encrypted = p.place.Recipients.Encrypt(from)
		stream = encrypted
	}
	blob, err := p.put(ctx, stream, types.BlobInfo{Size: -1}, false)
	_ = from.CloseWithError(errAbandoned)
	if failed := <-written; failed != nil && !errors.Is(failed, errAbandoned) {
		return blob, failed // the library's error says less
	}
	if err == nil && encrypted != nil {
		blob.Annotations, err = encrypted.Annotations()
	}
	return blob, err
}

func compress(to io.Writer, write func(io.Writer) error) error {
	z, err := zstd.NewWriter(to, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(window))
	if err != nil {
		return err
	}
	if err := write(z); err != nil {
		return err // without an end of the stream
	}
	return z.Close()
}

// archive writes files as a tar archive that depends on nothing but the files.
func archive(ctx context.Context, source *checkpoint.Source, files []checkpoint.File, to io.Writer) error {
	out := tar.NewWriter(to)
	for _, f := range files {
		if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.Path, Size: f.Size, Mode: 0o600}); err != nil {
			return err
		}
		if err := copyFile(ctx, source, f, out); err != nil {
			return err
		}
	}
	return out.Close()
}

// copyFile writes a file, which must still be as it was signed for.
func copyFile(ctx context.Context, source *checkpoint.Source, f checkpoint.File, to io.Writer) error {
	from, err := source.Open(f.Path)
	if err != nil {
		return err
	}
	defer from.Close()
	return f.Copy(ctx, to, from)
}

// read returns the manifest or its signature.
func read(source *checkpoint.Source, name string) ([]byte, error) {
	f, err := source.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, checkpoint.MaxManifest))
}

// annotations tell people and tools what the artifact is: nothing here is trusted. Names that begin with org.criu are
// those of other runtimes' checkpoint images.
func annotations(source *checkpoint.Source) map[string]string {
	m := source.Manifest
	var images []string
	for _, c := range m.Containers {
		if c.ImageRef != "" {
			images = append(images, c.ImageRef)
		}
	}
	all := map[string]string{
		imagespec.AnnotationCreated:          m.CheckpointedAt.UTC().Format(time.RFC3339),
		"org.criu.checkpoint.engine.name":    "crius",
		"org.criu.checkpoint.pod.name":       m.Name,
		"org.criu.checkpoint.pod.namespace":  m.Namespace,
		"org.criu.checkpoint.host.arch":      m.Architecture,
		"org.criu.checkpoint.host.kernel":    m.Kernel,
		"org.criu.checkpoint.criu.version":   criuVersion(source),
		"checkpoint.crius.run/images":        strings.Join(images, ","),
		"checkpoint.crius.run/handler":       m.Handler,
		"checkpoint.crius.run/signature-key": source.Key,
	}
	for key, value := range all {
		if value == "" {
			delete(all, key)
		}
	}
	return all
}

// versionLine is in the log of criu.
var versionLine = regexp.MustCompile(`Version: ([0-9][0-9.]*)`)

// criuVersion returns the version of criu that has written the images; empty: its log does not say.
func criuVersion(source *checkpoint.Source) string {
	for _, c := range source.Manifest.Containers {
		f, err := source.Open(c.Directory + "/" + checkpoint.DumpLog)
		if err != nil {
			continue
		}
		head, err := io.ReadAll(io.LimitReader(f, 4<<10))
		_ = f.Close()
		if found := versionLine.FindSubmatch(head); err == nil && found != nil {
			return string(found[1])
		}
	}
	return ""
}
