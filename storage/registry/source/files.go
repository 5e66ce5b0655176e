package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

// Limits of an artifact. The models with the most files have a few hundred.
const (
	MaxFiles     = 1000 // and layers
	maxPath      = 1024 // bytes of a file's path
	maxComponent = 255  // bytes; the limit of file systems
	maxLevels    = 32   // of directories
	maxDirs      = 1000 // each is synced
)

// File is a file of an OCI artifact: a layer with a name.
type File struct {
	Path   string // relative, without . and ..
	Digest digest.Digest
	Size   int64
}

// nameAnnotations are the annotations with the name of a layer's file: first that of ORAS, as in
// CRI-O, then that of ModelPack, under its present and its former prefix.
var nameAnnotations = []string{imagespec.AnnotationTitle, "org.cncf.model.filepath", "org.cnai.model.filepath"}

// SeccompProfile is the media type of the config of an artifact with a seccomp profile.
const SeccompProfile = "application/vnd.cncf.seccomp-profile.config.v1+json"

// imageConfigs are the media types of the configs of images.
var imageConfigs = []string{"", imagespec.MediaTypeImageConfig, manifest.DockerV2Schema2ConfigMediaType}

// isArtifact reports whether a manifest belongs to an artifact: its config is not that of an image
// (image-spec, "Guidelines for Artifact Usage").
func isArtifact(m manifest.Manifest) bool {
	oci, ok := m.(*manifest.OCI1)
	return ok && !slices.Contains(imageConfigs, oci.Config.MediaType)
}

// hasArtifactType reports whether a manifest has an artifact type. Some images that can be run have
// one as well.
func hasArtifactType(m manifest.Manifest) bool {
	oci, ok := m.(*manifest.OCI1)
	return ok && oci.ArtifactType != ""
}

// FilesOf returns the files of the artifact with this manifest. It refuses paths that could lead
// elsewhere, and artifacts without any file. Layers without a name are left out, as in CRI-O:
// nobody could find them. The one layer of a seccomp profile needs no name.
func FilesOf(content []byte) ([]File, error) {
	m, err := manifest.OCI1FromManifest(content)
	if err != nil {
		return nil, fmt.Errorf("artifact manifest: %w: %w", err, fault.Invalid)
	}
	var files []File
	taken := map[string]bool{} // true: by a file; false: by a directory
	for i, layer := range m.Layers {
		var name string
		for _, key := range nameAnnotations {
			name = cmp.Or(name, layer.Annotations[key])
		}
		if name == "" && m.Config.MediaType == SeccompProfile && len(m.Layers) == 1 {
			name = "profile.json" // the tools that push profiles leave it out
		}
		if name == "" {
			continue
		}
		f := File{Path: path.Clean(name), Digest: layer.Digest, Size: layer.Size}
		err := checkPath(f.Path)
		if err == nil {
			err = take(taken, f.Path)
		}
		if err != nil {
			return nil, fmt.Errorf("artifact manifest: file name %.100q of layer %d: %w: %w", name, i, err, fault.Invalid)
		}
		files = append(files, f)
		if dirs := len(taken) - len(files); dirs > maxDirs {
			return nil, fmt.Errorf("artifact manifest: its files are in more than %d directories: %w", maxDirs, fault.Invalid)
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("artifact manifest: it is no container image, but an artifact with the config %.100q, and has no file that could be mounted: none of its %d layers has a name; use an image, or push the artifact with the annotation %s on each layer: %w",
			m.Config.MediaType, len(m.Layers), imagespec.AnnotationTitle, fault.Invalid)
	}
	return files, nil
}

func checkPath(name string) error {
	parts := strings.Split(name, "/")
	switch {
	case name == "." || !filepath.IsLocal(name):
		return errors.New("it is not a path inside the artifact")
	case len(name) > maxPath:
		return fmt.Errorf("it has %d bytes, more than %d", len(name), maxPath)
	case len(parts) > maxLevels:
		return fmt.Errorf("it is more than %d directories deep", maxLevels)
	case slices.ContainsFunc(parts, func(p string) bool { return len(p) > maxComponent }):
		return fmt.Errorf("a part of it has more than %d bytes", maxComponent)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return errors.New("it has control characters or is not UTF-8")
	}
	return nil
}

// take notes the path of a file and the directories above it.
func take(taken map[string]bool, name string) error {
	if _, known := taken[name]; known {
		return errors.New("another layer has it")
	}
	taken[name] = true
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if taken[dir] {
			return fmt.Errorf("another layer has the file %.100q", dir)
		}
		taken[dir] = false
	}
	return nil
}

// Contents is the source of an artifact's files. No file may have more bytes than its manifest
// says.
type Contents struct{ *Image }

// Contents returns the source of the artifact's files, whose content nobody has checked.
func (s *Image) Contents() Contents { return Contents{s} }

// Guard implements download.Source.
func (c Contents) Guard(_ context.Context, info types.BlobInfo, stream io.ReadCloser) io.ReadCloser {
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(&awaited{stream, c.Image}, info.Size), stream}
}

// awaited counts the reads of an answer that are in progress.
type awaited struct {
	io.Reader
	of *Image
}

// Read implements io.Reader.
func (a *awaited) Read(p []byte) (int, error) {
	a.of.answers.Add(1)
	defer a.of.answers.Add(-1)
	return a.Reader.Read(p)
}

// Kind is what an artifact must be for one purpose.
type Kind struct {
	Config  string // media type of its config
	MaxSize int64  // of all its files, in bytes
	Single  bool   // it has one layer
}

// Check refuses an artifact that is not of this kind, and any image. A nil kind accepts everything.
func (k *Kind) Check(content []byte, files []File) error {
	if k == nil {
		return nil
	}
	if len(files) == 0 {
		return fmt.Errorf("it is a container image, not an OCI artifact with the config %s: %w", k.Config, fault.Invalid)
	}
	m, err := manifest.OCI1FromManifest(content)
	if err != nil {
		return fmt.Errorf("artifact manifest: %w: %w", err, fault.Invalid)
	}
	if m.Config.MediaType != k.Config {
		return fmt.Errorf("it is an OCI artifact with the config %.100q, not %s: %w", m.Config.MediaType, k.Config, fault.Invalid)
	}
	if k.Single && len(m.Layers) != 1 {
		return fmt.Errorf("it has %d layers, not one: %w", len(m.Layers), fault.Invalid)
	}
	left := k.MaxSize
	for _, f := range files {
		if left -= f.Size; f.Size > k.MaxSize || left < 0 {
			return fmt.Errorf("its files have more than %d bytes: %w", k.MaxSize, fault.Invalid)
		}
	}
	return nil
}
