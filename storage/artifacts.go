package storage

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/durable"
)

// artifacts are the OCI artifacts beside the images of containers/storage. Their methods accept ids
// of both.
type artifacts struct {
	*artifact.Store

	lib    cstorage.Store
	holds  *holds
	pinned func(*Image) bool
}

// openArtifacts sets s.artifacts, even if it fails.
func (s *Store) openArtifacts(ctx context.Context) error {
	s.artifacts = &artifacts{lib: s.store, holds: s.holds, pinned: s.images.pinned}
	var additional []string
	for _, dir := range s.cfg.AdditionalArtifactStores {
		if filepath.Clean(dir) == s.roots.ForImages() {
			return fmt.Errorf("image.additional_artifact_stores: %s is the image root itself: %w", dir, fault.Precondition)
		}
		additional = append(additional, artifact.In(dir))
	}
	var err error
	s.artifacts.Store, err = artifact.Open(ctx, artifact.Config{
		Additional:  additional,
		Dir:         artifact.In(s.roots.ForImages()),
		Former:      artifact.In(s.roots.Graph),
		RunRoot:     s.store.RunRoot(),
		ReadOnly:    s.cfg.ReadOnly,
		IsImage:     func(id string) (bool, error) { return artifact.HasImage(s.store, id) },
		Pulls:       &s.pulls,
		Connections: s.cfg.PullConnections,
		Downloads:   s.downloads,
		Settings:    s.artifactSettings,
	})
	return err
}

func (s *Store) artifactSettings() artifact.Settings {
	cfg := s.now()
	return artifact.Settings{ProgressTimeout: cfg.ProgressTimeout, MinPullRate: cfg.MinPullRate, Parallel: cfg.ParallelLayers}
}

// addTo adds the artifacts to a list of images, which is sorted by id.
func (a *artifacts) addTo(ctx context.Context, images []*Image) []*Image {
	taken := func(name string) bool {
		return slices.ContainsFunc(images, func(i *Image) bool { return slices.Contains(i.RepoTags, name) })
	}
	for _, one := range a.All(ctx, taken) {
		images = append(images, a.image(one))
	}
	slices.SortFunc(images, func(a, b *Image) int { return strings.Compare(a.ID, b.ID) })
	return images
}

func (a *artifacts) image(of *artifact.Artifact) *Image {
	record := recordOf(of)
	image := &Image{
		ID:          of.ID,
		RepoTags:    repoTags(record),
		RepoDigests: repoDigests(record),
		Size:        max(of.Size(), 1),
		Config:      &imagespec.ImageConfig{},
		Files:       of.Files,
		Annotations: of.Annotations,
		ReadOnly:    of.ReadOnly,
		artifact:    of,
	}
	image.Pinned = a.pinned(image) || of.ReadOnly
	return image
}

// recordOf returns the record that containers/storage would have of an artifact.
func recordOf(a *artifact.Artifact) *cstorage.Image {
	return &cstorage.Image{ID: a.ID, Names: a.Names, NamesHistory: a.Former, Digests: a.Digests}
}

// mounts reports whether a root file system mounts an artifact. An artifact is never the root of a
// container, even if another tool has stored an image with its id.
func (a *artifacts) mounts(r Rootfs) bool { return r.ReadOnly && a.Has(r.ImageID) }

// use notes that a root file system uses its image or artifact, and returns the directories of it,
// top first. They stay until drop.
func (a *artifacts) use(ctx context.Context, r Rootfs) ([]string, error) {
	if !a.mounts(r) {
		return a.holds.use(ctx, r.ImageID, r.ID)
	}
	if err := a.holds.owned(); err != nil {
		return nil, err
	}
	dir, err := a.Use(r.ImageID, r.ID)
	return []string{dir}, err
}

func (a *artifacts) drop(ctx context.Context, r Rootfs) error {
	if !a.mounts(r) {
		return a.holds.drop(ctx, r.ImageID, r.ID)
	}
	if err := a.holds.owned(); err != nil {
		return err
	}
	a.Drop(ctx, r.ImageID, r.ID)
	return nil
}

func (a *artifacts) removeImage(ctx context.Context, image *Image) error {
	if len(image.Files) == 0 {
		return a.holds.remove(ctx, image.ID)
	}
	if err := a.holds.owned(); err != nil {
		return err
	}
	return a.Remove(ctx, image.ID)
}

// damage says why an image or artifact cannot be mounted.
func (a *artifacts) damage(id string) error {
	if !a.Has(id) {
		return durable.ImageUsable(a.lib, id)
	}
	return a.Check(id)
}
