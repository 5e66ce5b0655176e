package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/pull"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/registry/verifier"
)

// Profiles are the security profiles that kubelets have pulled for oci_ref of CRI, which are OCI
// artifacts. They have a store of their own, because they are neither images nor volumes: only the
// kubelet lists and removes them (docs/decisions/0075-seccomp-profiles.md). Methods are safe for
// concurrent use.
type Profiles struct {
	store     *artifact.Store
	puller    *pull.Puller
	policies  *trust.Policies
	verifiers *verifier.Verifiers
	owned     func() error
}

// Profile is a profile in the store.
type Profile struct {
	Digest string   // of its manifest
	Refs   []string // by which it was pulled
	Size   uint64   // bytes
}

// ProfileUse is the use of a profile by a pod.
type ProfileUse struct {
	Ref       string // full name with a digest
	Namespace string // of the pod; picks the signature policy
	Kind      *source.Kind
}

// profilesIn returns the directory of the store in an image root.
func profilesIn(root string) string { return filepath.Join(root, "crius-profiles") }

// openProfiles sets s.Profiles, even if it fails.
func (s *Store) openProfiles(ctx context.Context) (err error) {
	s.Profiles = &Profiles{policies: s.policies, verifiers: s.verifiers, owned: s.holds.owned}
	s.Profiles.store, err = artifact.Open(ctx, artifact.Config{
		Dir:         profilesIn(s.roots.ForImages()),
		RunRoot:     s.store.RunRoot(),
		ReadOnly:    s.cfg.ReadOnly,
		IsImage:     func(string) (bool, error) { return false, nil },
		Pulls:       &s.pulls,
		Connections: s.cfg.PullConnections,
		Settings:    s.artifactSettings,
	})
	if err == nil && !s.cfg.ReadOnly {
		s.Profiles.store.Adopt(ctx, nil) // no root file system uses profiles: damaged ones are removed
	}
	return err
}

// Pull pulls a profile by the name with digest in req, which must also have a Kind. Check reports
// why its content cannot be used. If the profile is in the store, the registry is not asked, unless
// the signature policy requires signatures that are not stored; cached reports that it was not.
// Errors are those of Store.Pull.
func (p *Profiles) Pull(ctx context.Context, req PullRequest, check func(content []byte) error) (cached bool, err error) {
	use := ProfileUse{Ref: req.Image, Namespace: req.Namespace, Kind: req.Kind}
	name, err := canonical(use.Ref)
	if err != nil {
		return false, err
	}
	accept := func(a *artifact.Artifact) error {
		content, err := a.Content(ctx, *req.Kind)
		if err == nil {
			err = check(content)
		}
		return err
	}
	cached, err = p.present(ctx, name, use, accept)
	if cached || err != nil {
		return cached, err
	}
	req.Into = func(ctx context.Context, src *source.Image) (*artifact.Artifact, error) {
		return p.store.Pull(ctx, src, artifact.Terms{Ref: req.Image, Check: accept})
	}
	return false, p.puller.Pull(ctx, req, func(context.Context, pull.Result) error { return nil })
}

// present reports whether the profile is in the store and can be used as it is, and notes the
// reference then.
func (p *Profiles) present(ctx context.Context, name reference.Canonical, use ProfileUse, accept func(*artifact.Artifact) error) (bool, error) {
	a := p.store.WithDigest(name.Digest())
	if a == nil {
		return false, nil
	}
	signed, err := p.admit(ctx, a, name, use.Namespace)
	if !signed || err != nil {
		return false, err
	}
	err = accept(a)
	if errors.Is(err, artifact.ErrDamaged) || errors.Is(err, fault.NotFound) {
		slog.WarnContext(ctx, "security profile is damaged, pulling it again", "image", a.ID, "err", err)
		return false, p.store.Remove(ctx, a.ID)
	}
	if err == nil {
		err = p.store.NoteRef(ctx, a.ID, use.Ref)
	}
	if errors.Is(err, fault.NotFound) { // it has just been removed
		return false, nil
	}
	return err == nil, err
}

// Content returns the content of a profile in the store, for a pod. It asks no registry. If the
// profile is not there, or the signature policy needs to see signatures that are not stored, the
// error is fault.Precondition or ErrSignature.
func (p *Profiles) Content(ctx context.Context, use ProfileUse) ([]byte, error) {
	name, err := canonical(use.Ref)
	if err != nil {
		return nil, err
	}
	a := p.store.WithDigest(name.Digest())
	if a == nil {
		return nil, errNotPulled
	}
	signed, err := p.admit(ctx, a, name, use.Namespace)
	if err == nil && !signed {
		err = fmt.Errorf("the signature policy requires signatures that were not pulled with it; pull it again by PullSecurityProfile: %w: %w", ErrSignature, fault.Denied)
	}
	if err != nil {
		return nil, err
	}
	content, err := a.Content(ctx, *use.Kind)
	switch {
	case errors.Is(err, fault.NotFound): // it has just been removed
		return nil, errNotPulled
	case errors.Is(err, artifact.ErrDamaged):
		return nil, fmt.Errorf("it is damaged on this node; pull it again by PullSecurityProfile: %w: %w", err, fault.Precondition)
	}
	return content, err
}

var errNotPulled = fmt.Errorf("it is not on this node; pull it by PullSecurityProfile, as the kubelet does at its next attempt: %w", fault.Precondition)

// admit asks the signature policy and the image verifiers about a profile in the store under a
// name. signed is false if the policy needs other signatures than those that are stored.
func (p *Profiles) admit(ctx context.Context, a *artifact.Artifact, name reference.Canonical, namespace string) (signed bool, err error) {
	policy, err := p.policies.For(namespace)
	if err != nil {
		return false, err
	}
	err = trace.Do(ctx, "check signature policy", func(ctx context.Context) error {
		signed, err = p.isSigned(ctx, policy, a, name)
		return err
	})
	if !signed || err != nil {
		return false, err
	}
	if !p.verifiers.On() {
		return true, nil
	}
	content, err := p.store.Manifest(ctx, a)
	if err != nil {
		return false, err
	}
	_, err = p.verifiers.Check(ctx, name.String(), imagespec.Descriptor{
		MediaType: imagespec.MediaTypeImageManifest, Digest: digest.FromBytes(content), Size: int64(len(content)),
	})
	return err == nil, err
}

// isSigned reports whether the policy accepts the profile with the signatures that are stored. A
// refusal that no signature would change is an error.
func (p *Profiles) isSigned(ctx context.Context, policy *trust.Policy, a *artifact.Artifact, name reference.Canonical) (bool, error) {
	if policy.AcceptsAll {
		return true, nil
	}
	ref, err := docker.NewReference(name)
	if err != nil {
		return false, fmt.Errorf("%w: %w", err, fault.Invalid)
	}
	if decided, err := policy.CheckName(ctx, ref); decided {
		return err == nil, err
	}
	answer := policy.Answer(a.ID, name)
	if p.policies.Accepted(answer) {
		return true, nil
	}
	switch err := p.store.Admit(ctx, policy, a, ref); {
	case err == nil:
		p.policies.Accept(answer)
		return true, nil
	case errors.Is(err, fault.Denied):
		return false, nil
	default:
		return false, err
	}
}

// List returns the profiles, sorted by digest.
func (p *Profiles) List() []Profile {
	list := []Profile{}
	for _, a := range p.store.List() {
		list = append(list, Profile{Digest: digest.NewDigestFromEncoded(digest.SHA256, a.ID).String(), Refs: slices.Clone(a.Refs), Size: a.Size()})
	}
	return list
}

// Remove removes the profile with a digest that List has returned; if there is none, that is no
// error. Containers have their filter already.
func (p *Profiles) Remove(ctx context.Context, of string) error {
	d, err := digest.Parse(of)
	if err != nil {
		return fmt.Errorf("digest %.100q: %w: %w", of, err, fault.Invalid)
	}
	if err := p.owned(); err != nil {
		return err
	}
	if d.Algorithm() != digest.SHA256 {
		return nil
	}
	return p.store.Remove(ctx, d.Encoded())
}

// canonical returns the full name with digest that a reference consists of. It has no tag.
func canonical(ref string) (reference.Canonical, error) {
	named, err := reference.ParseNamed(ref)
	if err != nil {
		return nil, fmt.Errorf("reference %.200q: %w: %w", ref, err, fault.Invalid)
	}
	digested, ok := named.(reference.Canonical)
	if !ok {
		return nil, fmt.Errorf("reference %.200q: it has no digest; name the profile as REGISTRY/NAME@DIGEST: %w", ref, fault.Invalid)
	}
	exact, err := reference.WithDigest(reference.TrimNamed(named), digested.Digest())
	if err != nil {
		return nil, fmt.Errorf("reference %.200q: %w: %w", ref, err, fault.Invalid)
	}
	return exact, nil
}

// defects returns what is wrong with the profiles.
func (p *Profiles) defects() (all []Defect) {
	for _, a := range p.store.List() {
		if err := a.Intact(); err != nil {
			all = append(all, Defect{
				Object: "security profile sha256:" + a.ID, Text: err.Error(), Remedy: "remove it, so that it is pulled again",
				Mend: func(ctx context.Context) error { return p.store.Remove(ctx, a.ID) },
			})
		}
	}
	return all
}
