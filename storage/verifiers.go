package storage

import (
	"context"
	"fmt"
	"slices"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/registry/verifier"
)

// maxVerified bounds how often verifiers are asked about one use: an image may have many names and
// manifests, and each answer may take seconds.
const maxVerified = 8

// verify asks the image verifiers about an image in the store, under each of the names that the
// use may mean, and each of the manifests that such a name may mean, until they accept one.
func (s *Store) verify(ctx context.Context, use Use) error {
	record, err := s.record(ctx, use.ImageID)
	if err != nil {
		return err
	}
	names, err := s.namesOfUse(record, use.Name)
	if err != nil {
		return err
	}
	var refused error
	asked := 0
	for _, name := range names {
		descriptors, err := s.descriptors(ctx, record, name)
		if err != nil {
			return err
		}
		for _, d := range descriptors {
			if asked++; asked > maxVerified {
				break
			}
			_, err := s.verifiers.Check(ctx, name.String(), d)
			if err == nil || ctx.Err() != nil {
				return err
			}
			if refused == nil {
				refused = err
			}
		}
	}
	if refused == nil {
		refused = fmt.Errorf("no manifest of %s is stored, pull it again: %w: %w", names[0], ErrSignature, fault.Denied)
	}
	return pullerror.Shown(refused.Error(), refused)
}

// Verdicts returns what the image verifiers said about an image since the last restart or reload.
func (s *Store) Verdicts(ctx context.Context, image *Image) ([]verifier.Verdict, error) {
	if !s.verifiers.On() {
		return nil, nil
	}
	record, err := s.record(ctx, image.ID)
	if err != nil {
		return nil, err
	}
	return s.verifiers.Verdicts(record.Digests), nil
}

// descriptors describe the manifests of an image that a name may mean. Indexes come first: a name
// leads to one if there is one, and so the pull has asked about it.
func (s *Store) descriptors(ctx context.Context, record *cstorage.Image, name reference.Named) ([]imagespec.Descriptor, error) {
	digests := slices.Clone(record.Digests)
	if digested, ok := name.(reference.Canonical); ok {
		digests = []digest.Digest{digested.Digest()}
	}
	if a := s.artifacts.Find(record.ID); a != nil {
		content, err := s.artifacts.Manifest(ctx, a)
		if err != nil {
			return nil, err
		}
		return []imagespec.Descriptor{{MediaType: imagespec.MediaTypeImageManifest, Digest: digest.FromBytes(content), Size: int64(len(content))}}, nil
	}
	if err := s.locks.Await(ctx, durable.ToRead); err != nil {
		return nil, err
	}
	src, err := trust.OpenStored(ctx, s.store, record.ID)
	if err != nil {
		return nil, err
	}
	defer func() { _ = src.Close() }()
	var indexes, manifests []imagespec.Descriptor
	for _, d := range digests {
		if !slices.Contains(record.BigDataNames, cstorage.ImageDigestManifestBigDataNamePrefix+"-"+d.String()) {
			continue
		}
		content, mediaType, err := image.UnparsedInstance(src, &d).Manifest(ctx)
		if err != nil {
			return nil, fmt.Errorf("read stored manifest: %w", err)
		}
		described := imagespec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(content))}
		if manifest.MIMETypeIsMultiImage(mediaType) {
			indexes = append(indexes, described)
		} else {
			manifests = append(manifests, described)
		}
	}
	return append(indexes, manifests...), nil
}
