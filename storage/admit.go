package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/trust"
)

// Use is the use of an image by a pod.
type Use struct {
	ImageID   string
	Name      string // the name that the pod's author uses for the image; may be an id
	Namespace string // of the pod; picks the signature policy
}

// maxAsked bounds how often a policy is asked about one use.
const maxAsked = 256

// Admit asks the signature policy and the image verifiers about an image in the store, as Pull did.
// The pull may have been for another namespace, or under another policy or other keys. A refusal is
// ErrSignature, and fault.Denied or fault.Precondition (docs/decisions/0031-signatures-at-use.md).
func (s *Store) Admit(ctx context.Context, use Use) error {
	policy, err := s.policies.For(use.Namespace)
	if err != nil {
		return err
	}
	if !policy.AcceptsAll {
		err := trace.Do(ctx, "check signature policy", func(ctx context.Context) error { return s.admit(ctx, policy, use) })
		if err != nil {
			return err
		}
	}
	if !s.verifiers.On() || s.now().VerifiersAtPullOnly {
		return nil
	}
	return s.verify(ctx, use)
}

func (s *Store) admit(ctx context.Context, policy *trust.Policy, use Use) error {
	record, err := s.record(ctx, use.ImageID)
	if err != nil {
		return err
	}
	names, err := s.namesOfUse(record, use.Name)
	if err != nil {
		return err
	}
	var refusals []error
	asked := 0
	for _, name := range names {
		err := s.admitName(ctx, policy, record, name, &asked)
		if err == nil {
			return nil
		}
		if len(refusals) < 3 {
			refusals = append(refusals, err)
		}
	}
	err = errors.Join(refusals...)
	return pullerror.Shown(fmt.Sprintf("%s: %v", names[0], err), err)
}

func (s *Store) record(ctx context.Context, id string) (*cstorage.Image, error) {
	if a := s.artifacts.Find(id); a != nil {
		return recordOf(a), nil
	}
	entries, err := s.images.refresh(ctx)
	if err != nil {
		return nil, err
	}
	e, ok := entries[id]
	if !ok || e.image == nil {
		return nil, fmt.Errorf("image %s is not in the store, pull it again: %w", id, fault.NotFound)
	}
	return &e.record, nil
}

// namesOfUse returns the names by which a policy may know the image: the name that the pod's author
// gave, if the image was pulled by it. For an id it returns all names by which the image was
// pulled, since its content is the same under each.
func (s *Store) namesOfUse(record *cstorage.Image, asked string) ([]reference.Named, error) {
	pulled := parseNames(append(slices.Clone(record.Names), record.NamesHistory...))
	var found []reference.Named
	if name, err := registry.ParseReference(asked); err == nil {
		wanted, err := registry.LocalNames(s.registries().Context(), name)
		if err != nil {
			return nil, err
		}
		for _, name := range wanted {
			if wasPulled(record, pulled, name) {
				found = append(found, name)
			}
		}
	}
	if id, ok := registry.WholeID(asked); ok && id == record.ID {
		found = pulled
	}
	if len(found) == 0 {
		return nil, pullerror.Shown(fmt.Sprintf("image %s refused by the signature policy: it was not pulled as %q, and an image is judged by the names it was pulled by; "+
			"use one of those names, or pull it by this one", record.ID, asked), errors.Join(ErrSignature, fault.Denied))
	}
	return found, nil
}

// wasPulled reports whether the record's image was pulled by a name: by that tag, or as that
// manifest of the repository.
func wasPulled(record *cstorage.Image, pulled []reference.Named, name reference.Named) bool {
	digested, ok := name.(reference.Canonical)
	return slices.ContainsFunc(pulled, func(other reference.Named) bool {
		if ok {
			return other.Name() == name.Name() && slices.Contains(record.Digests, digested.Digest())
		}
		return other.String() == name.String()
	})
}

// admitName asks the policy about an image under a name.
func (s *Store) admitName(ctx context.Context, policy *trust.Policy, record *cstorage.Image, name reference.Named, asked *int) error {
	ref, err := docker.NewReference(name)
	if err != nil {
		return err
	}
	if decided, err := policy.CheckName(ctx, ref); decided {
		return err
	}
	answer := policy.Answer(record.ID, name)
	if s.policies.Accepted(answer) {
		return nil
	}
	if a := s.artifacts.Find(record.ID); a != nil {
		err := s.artifacts.Admit(ctx, policy, a, ref)
		if err == nil {
			s.policies.Accept(answer)
		}
		return err
	}
	if err := s.locks.Await(ctx, durable.ToRead); err != nil {
		return err
	}
	src, err := trust.OpenStored(ctx, s.store, record.ID)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	manifests, err := storedManifests(ctx, src, record, name)
	if err != nil {
		return err
	}
	var refused error
	for _, m := range manifests {
		if *asked++; *asked > maxAsked {
			return fmt.Errorf("the image is stored under too many names and manifests; refer to it by name and digest: %w: %w", ErrSignature, fault.Denied)
		}
		err := policy.Check(ctx, image.UnparsedInstanceWithReference(m, ref))
		if err == nil {
			s.policies.Accept(answer)
			return nil
		}
		if refused == nil {
			refused = err
		}
	}
	return refused
}

// storedManifests returns the manifests of an image that a name may mean, those with signatures
// first.
func storedManifests(ctx context.Context, src types.ImageSource, record *cstorage.Image, name reference.Named) ([]types.UnparsedImage, error) {
	var signed, unsigned []types.UnparsedImage
	digests := slices.Clone(record.Digests)
	if digested, ok := name.(reference.Canonical); ok {
		var err error
		if digests, err = instancesOf(ctx, src, digested.Digest(), digests); err != nil {
			return nil, err
		}
	}
	for _, d := range digests {
		if !slices.Contains(record.BigDataNames, cstorage.ImageDigestManifestBigDataNamePrefix+"-"+d.String()) {
			continue
		}
		m := image.UnparsedInstance(src, &d)
		_, mediaType, err := m.Manifest(ctx)
		if err != nil {
			return nil, fmt.Errorf("read stored manifest: %w", err)
		}
		switch {
		case manifest.MIMETypeIsMultiImage(mediaType):
		case record.BigDataSizes[trust.SignatureItem(d)] > 0:
			signed = append(signed, m)
		default:
			unsigned = append(unsigned, m)
		}
	}
	if all := append(signed, unsigned...); len(all) > 0 {
		return all, nil
	}
	return nil, fmt.Errorf("no manifest of %s is stored, pull it again: %w: %w", name, ErrSignature, fault.Denied)
}

// instancesOf returns those of an image's manifests that a digest means: the manifest with the
// digest or, if that is an index, the manifests that it lists.
func instancesOf(ctx context.Context, src types.ImageSource, wanted digest.Digest, manifests []digest.Digest) ([]digest.Digest, error) {
	raw, mediaType, err := image.UnparsedInstance(src, &wanted).Manifest(ctx)
	if err != nil {
		return nil, fmt.Errorf("read stored manifest: %w", err)
	}
	if !manifest.MIMETypeIsMultiImage(mediaType) {
		return []digest.Digest{wanted}, nil
	}
	list, err := manifest.ListFromBlob(raw, mediaType)
	if err != nil {
		return nil, fmt.Errorf("stored image index: %w", err)
	}
	listed := list.Instances()
	return slices.DeleteFunc(manifests, func(d digest.Digest) bool { return !slices.Contains(listed, d) }), nil
}
