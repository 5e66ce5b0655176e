package image

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Files are an OCI artifact in ORAS's form: content by file name.
type Files map[string]string

// ArtifactType is the type of Files.
const ArtifactType = "application/vnd.example.model"

// Build makes the manifest.
func (f Files) Build() (*Artifact, error) {
	return f.BuildWith(imagespec.DescriptorEmptyJSON.MediaType)
}

// BuildWith makes the manifest, with a config of that media type.
func (f Files) BuildWith(config string) (*Artifact, error) {
	built := &Artifact{
		MediaType: imagespec.MediaTypeImageManifest,
		Blobs:     map[digest.Digest][]byte{},
		Platform:  here(),
		Config:    imagespec.DescriptorEmptyJSON.Digest,
	}
	built.Blobs[built.Config] = imagespec.DescriptorEmptyJSON.Data
	manifest := imagespec.Manifest{
		Versioned:    specs.Versioned{SchemaVersion: 2},
		MediaType:    built.MediaType,
		ArtifactType: ArtifactType,
		Config:       imagespec.DescriptorEmptyJSON,
		Layers:       []imagespec.Descriptor{},
	}
	manifest.Config.MediaType = config
	for _, name := range slices.Sorted(maps.Keys(f)) {
		content := []byte(f[name])
		layer := imagespec.Descriptor{
			MediaType:   "application/octet-stream",
			Digest:      digest.FromBytes(content),
			Size:        int64(len(content)),
			Annotations: map[string]string{imagespec.AnnotationTitle: name},
		}
		manifest.Layers = append(manifest.Layers, layer)
		built.Blobs[layer.Digest] = content
	}
	var err error
	if built.Manifest, err = json.Marshal(manifest); err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return built, nil
}
