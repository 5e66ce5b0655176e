// Package image builds small container images from Go values: layers, config,
// manifest and multi-platform index, as OCI or as Docker schema 2.
//
// It is meant for tests and for the demo, so it depends on no testing package,
// keeps everything in memory and is reproducible: the same input gives the same
// digests. It does not check its input. A path may climb out of the layer, a
// digest may be wrong, a manifest may be nonsense: tests of hostile images need
// that.
//
//	layer, err := image.NewLayer(image.Dir("etc"), image.Text("etc/motd", "hello\n"))
//	built, err := image.Image{Layers: []image.Layer{layer}}.Build()
//	err = registry.Push("library/hello", "latest", built)
package image

import (
	"encoding/json"
	"fmt"
	"runtime"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Docker's media types, for Image.Docker.
const (
	DockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	DockerIndex    = "application/vnd.docker.distribution.manifest.list.v2+json"
	DockerConfig   = "application/vnd.docker.container.image.v1+json"
	DockerLayer    = "application/vnd.docker.image.rootfs.diff.tar.gzip"
)

// Image is the input of an image. The zero value builds an image without layers
// for this machine's platform.
type Image struct {
	Config      imagespec.ImageConfig
	Layers      []Layer
	Platform    imagespec.Platform // zero: linux and this machine's architecture
	Created     time.Time          // zero: the start of 2024
	Docker      bool               // Docker schema 2 instead of OCI media types
	Annotations map[string]string  // of the manifest; OCI only
}

// Artifact is a finished manifest or index with everything to which it refers.
// A test may also fill one by hand to serve bytes that no builder would make.
type Artifact struct {
	MediaType string
	Manifest  []byte
	Blobs     map[digest.Digest][]byte // config and layers
	Children  []*Artifact              // of an index
	Platform  imagespec.Platform       // of an image
	Config    digest.Digest            // of an image; its hex is the image id
}

// Digest returns the manifest's digest.
func (a *Artifact) Digest() digest.Digest { return digest.FromBytes(a.Manifest) }

// ID returns the image id that a container runtime reports: the config's digest
// without its algorithm.
func (a *Artifact) ID() string { return a.Config.Encoded() }

// Build makes the config and the manifest.
func (i Image) Build() (*Artifact, error) {
	if i.Platform.Architecture == "" {
		i.Platform = here()
	}
	if i.Created.IsZero() {
		i.Created = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	built := &Artifact{
		MediaType: imagespec.MediaTypeImageManifest,
		Blobs:     map[digest.Digest][]byte{},
		Platform:  i.Platform,
	}
	configType := imagespec.MediaTypeImageConfig
	if i.Docker {
		built.MediaType, configType = DockerManifest, DockerConfig
	}
	config, err := json.Marshal(i.config())
	if err != nil {
		return nil, fmt.Errorf("encode image config: %w", err)
	}
	built.Config = digest.FromBytes(config)
	built.Blobs[built.Config] = config

	manifest := imagespec.Manifest{
		Versioned:   specs.Versioned{SchemaVersion: 2},
		MediaType:   built.MediaType,
		Config:      imagespec.Descriptor{MediaType: configType, Digest: built.Config, Size: int64(len(config))},
		Layers:      []imagespec.Descriptor{},
		Annotations: i.Annotations,
	}
	for _, l := range i.Layers {
		manifest.Layers = append(manifest.Layers, l.descriptor(i.Docker))
		if l.Size == 0 {
			built.Blobs[l.Digest] = l.Blob
		}
	}
	built.Manifest, err = json.Marshal(manifest)
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return built, nil
}

func here() imagespec.Platform { return imagespec.Platform{OS: "linux", Architecture: runtime.GOARCH} }

func (i Image) config() imagespec.Image {
	config := imagespec.Image{
		Created:  &i.Created,
		Platform: i.Platform,
		Config:   i.Config,
		RootFS:   imagespec.RootFS{Type: "layers", DiffIDs: []digest.Digest{}},
	}
	for _, l := range i.Layers {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.DiffID)
		config.History = append(config.History, imagespec.History{Created: &i.Created, CreatedBy: "testkit"})
	}
	return config
}

// Index makes a multi-platform index of images, with Docker's media type if the
// first image has one.
func Index(images ...*Artifact) (*Artifact, error) {
	index := imagespec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: imagespec.MediaTypeImageIndex,
		Manifests: []imagespec.Descriptor{},
	}
	if len(images) > 0 && images[0].MediaType == DockerManifest {
		index.MediaType = DockerIndex
	}
	for _, image := range images {
		index.Manifests = append(index.Manifests, imagespec.Descriptor{
			MediaType: image.MediaType,
			Digest:    image.Digest(),
			Size:      int64(len(image.Manifest)),
			Platform:  &image.Platform,
		})
	}
	raw, err := json.Marshal(index)
	if err != nil {
		return nil, fmt.Errorf("encode index: %w", err)
	}
	return &Artifact{MediaType: index.MediaType, Manifest: raw, Children: images}, nil
}
