package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"strings"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/source"
)

// Image is an image as CRI describes it. It is shared between callers and must
// not be modified.
type Image struct {
	// ID is the only id of the image: 64 hexadecimal digits, without an algorithm.
	ID string
	// RepoTags are full names with registry and tag, sorted. They are empty if the image was pulled
	// by digest, or its tags have moved to other images.
	RepoTags []string
	// RepoDigests are full names with registry and digest, sorted. An image that has lost its last
	// name keeps those of its former names.
	RepoDigests []string
	// Size is what the image takes of the disk: the layers, those that other images share included, the
	// config and the manifests. It is an estimate until layers that another tool has added are measured.
	Size uint64
	// Config is what the image says about its containers: User, Env, Entrypoint, Cmd, WorkingDir,
	// StopSignal and Volumes. It was written by the author of the image, and must not be trusted
	// further. A large Config is complete only in the answer of Image, and else has only its User.
	Config *imagespec.ImageConfig
	// Foreign is the architecture that the image is for, if this node's processor does not run it;
	// empty: it does, or the image does not say.
	Foreign string
	// Annotations are those of the manifest. Large ones are left out.
	Annotations map[string]string
	// Pinned asks the kubelet never to remove the image: the configuration says so, or the image is
	// in a read-only store.
	Pinned bool
	// ReadOnly says that the image is in a store that crius only reads.
	ReadOnly bool
	// Files are the files of an OCI artifact, which cannot be run, but mounted as an image volume.
	Files []source.File

	artifact *artifact.Artifact // nil: it is an image
	topLayer string
	trimmed  bool // Config has only its User
}

// Content returns the content of the first file of an artifact of a kind. For anything else it
// returns an error.
func (i *Image) Content(ctx context.Context, kind source.Kind) ([]byte, error) {
	if i.artifact == nil {
		return nil, kind.Check(nil, nil)
	}
	return i.artifact.Content(ctx, kind)
}

// User returns the image's user: its uid if it is numeric, or else its name (CRI Image.uid and
// username). A number beyond 31 bits, or written with a sign or another base, is not a uid: it is
// returned as a name, for which the kubelet cannot verify that it is not root (CVE-2024-40635,
// CVE-2026-46680).
func (i *Image) User() (uid *int64, name string) {
	user := groupSuffix.ReplaceAllString(i.Config.User, "")
	if user == "" {
		return new(int64), ""
	}
	if n, err := strconv.ParseInt(user, 10, 32); err == nil && decimal.MatchString(user) {
		return &n, ""
	}
	return nil, user
}

var (
	groupSuffix = regexp.MustCompile(`(?s):.*$`)
	decimal     = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)
)

// maxDocument bounds the config and each manifest of an image that another tool has stored; the
// library bounds those that it pulls.
const maxDocument = 4 << 20

// load makes the Image of a record, and checks that its layers exist. It reports whether the image's size
// is estimated.
func (c *catalog) load(ctx context.Context, record *cstorage.Image) (image *Image, estimated bool, err error) {
	for name, size := range record.BigDataSizes {
		if size > maxDocument {
			return nil, false, fmt.Errorf("its %s is too large (%d bytes): %w", name, size, fault.Invalid)
		}
	}
	layers, err := durable.RecordedLayers(c.store, record.TopLayer)
	if err != nil {
		return nil, false, err
	}
	manifest, err := c.store.ImageBigData(record.ID, cstorage.ImageDigestBigDataKey)
	if err != nil {
		return nil, false, err
	}
	spec, err := specOf(ctx, c.store, record.ID, manifest)
	if err != nil {
		return nil, false, err
	}
	size, measured, err := c.usage.ofImage(record.ID, layers)
	if err == nil && !measured {
		size, err = estimate(ctx, c.store, record.ID)
	}
	if err != nil {
		return nil, false, err
	}
	return &Image{
		ID:          record.ID,
		Annotations: source.AnnotationsOf(manifest),
		RepoTags:    repoTags(record),
		RepoDigests: repoDigests(record),
		Size:        max(size, 1), // CRI requires more than zero
		Config:      runConfig(&spec.Config),
		Foreign:     source.ForeignArchitecture(spec.Architecture),
		topLayer:    record.TopLayer,
	}, !measured, nil
}

// repoTags returns the names with a tag.
func repoTags(record *cstorage.Image) []string {
	var tags []string
	for _, name := range parseNames(record.Names) {
		if tagged, ok := name.(reference.NamedTagged); ok {
			tags = append(tags, tagged.String())
		}
	}
	return sorted(tags)
}

// maxRepoDigests bounds the combinations of names and digests that are listed of one image.
const maxRepoDigests = 256

// repoDigests combines the repositories of an image's names with the digests of its manifests: its
// own, and that of the index from which it was chosen. The newest names come first. Too many
// combinations are left out, because all images go into one answer.
func repoDigests(record *cstorage.Image) []string {
	names := parseNames(record.Names)
	if len(names) == 0 {
		names = parseNames(record.NamesHistory)
	}
	var digests []string
	for _, name := range names {
		if len(digests) >= maxRepoDigests {
			break
		}
		if digested, ok := name.(reference.Canonical); ok {
			digests = append(digests, digested.String())
		}
		for _, d := range record.Digests {
			if digested, err := reference.WithDigest(reference.TrimNamed(name), d); err == nil && d.Validate() == nil {
				digests = append(digests, digested.String())
			}
		}
	}
	return sorted(digests)
}

// parseNames parses names, without those that are no registry names, which other tools may store.
func parseNames(names []string) []reference.Named {
	var parsed []reference.Named
	for _, name := range names {
		if named, err := reference.ParseNormalizedNamed(name); err == nil && named.String() == name {
			parsed = append(parsed, named)
		}
	}
	return parsed
}

// Images returns the images and artifacts, sorted by id.
func (s *Store) Images(ctx context.Context) ([]*Image, error) {
	images, err := s.images.list(ctx)
	if fault.DiskFull(err) && s.holds.owned() == nil {
		err = s.reserve.Spend(func() error { images, err = s.images.list(ctx); return err })
	}
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return s.artifacts.addTo(ctx, images), nil
}

// Image finds an image by its whole id, by a name with tag or digest, or by a short name. It is for
// references of pod authors. The error is fault.NotFound, or fault.Invalid if ref is no valid
// reference.
func (s *Store) Image(ctx context.Context, ref string) (*Image, error) {
	return s.imageBy(ctx, ref, find)
}

// LookUp finds an image like Image, and also by the unique beginning of its id: at least three
// digits, without "sha256:". It is for references that people type.
func (s *Store) LookUp(ctx context.Context, ref string) (*Image, error) {
	return s.imageBy(ctx, ref, lookUp)
}

func (s *Store) imageBy(ctx context.Context, ref string, find func([]*Image, string, func(string) ([]reference.Named, error)) (*Image, error)) (*Image, error) {
	images, err := s.Images(ctx)
	if err != nil {
		return nil, err
	}
	image, err := find(images, ref, func(name string) ([]reference.Named, error) {
		return registry.LocalNames(s.registries().Context(), name)
	})
	if err != nil {
		return nil, err
	}
	return image.whole(ctx, s)
}

// Remove removes an image with all its names; ref is any reference for LookUp (CRI RemoveImage). If
// root file systems use the image, or it is in a read-only store, the error is fault.Precondition,
// and the image stays as it is (docs/decisions/0059-images-in-use.md). Removing an image that does
// not exist succeeds.
func (s *Store) Remove(ctx context.Context, ref string) error {
	image, err := s.LookUp(ctx, ref)
	if errors.Is(err, fault.NotFound) {
		return s.removeUnlisted(ctx, strings.TrimPrefix(ref, "sha256:"))
	}
	if err == nil {
		s.artifacts.SweepDownloads() // the disk may have filled up
		err = s.reserve.Spend(func() error { return s.artifacts.removeImage(ctx, image) })
	}
	if err == nil {
		s.puller.Forget(image.ID)
		s.images.forget(image.ID) // else it stays in the list while another program has a lock
	}
	if fault.DiskFull(err) {
		err = fmt.Errorf("%w: %w", err, fault.Exhausted)
	}
	if err != nil {
		return fmt.Errorf("remove image: %w", err)
	}
	slog.InfoContext(ctx, "image removed", "image", image.ID, "name", ref)
	return nil
}

// removeUnlisted removes an image that is in no list since it is damaged, by its whole id.
func (s *Store) removeUnlisted(ctx context.Context, id string) error {
	if image, _ := s.store.Image(id); image == nil || !isID(id) {
		return nil
	}
	if err := s.holds.remove(ctx, id); err != nil {
		return fmt.Errorf("remove image: %w", err)
	}
	slog.InfoContext(ctx, "damaged image removed", "image", id)
	return nil
}
