package profile

import (
	"context"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/registry/source"
)

// Store is the store of pulled profiles; *storage.Profiles is the only implementation.
type Store interface {
	Pull(ctx context.Context, req storage.PullRequest, check func(content []byte) error) (cached bool, err error)
	Content(ctx context.Context, use storage.ProfileUse) ([]byte, error)
	List() []storage.Profile
	Remove(ctx context.Context, digest string) error
}

// pulledKind is what a kubelet may pull: one file (KEP-6061).
var pulledKind = source.Kind{Config: kind.Config, MaxSize: kind.MaxSize, Single: true}

// Pull pulls a seccomp profile by a name with a digest, unless it is in the store (cached). A
// profile that cannot be used is fault.Invalid, and is not stored.
func Pull(ctx context.Context, profiles Store, req storage.PullRequest) (cached bool, err error) {
	req.Kind = &pulledKind
	return profiles.Pull(ctx, req, func(content []byte) error {
		_, err := spec.ParsePulledProfile(content)
		return err
	})
}

// Pulled loads the profile that a security context names, for a pod of the namespace; nil: it names
// none. It asks no registry.
func Pulled(ctx context.Context, profiles Store, wanted *cri.SecurityProfile, namespace string) (*spec.Profile, error) {
	if wanted.GetProfileType() != cri.SecurityProfile_OCI {
		return nil, nil //nolint:nilnil // see above
	}
	content, err := profiles.Content(ctx, storage.ProfileUse{Ref: wanted.GetOciRef(), Namespace: namespace, Kind: &pulledKind})
	var profile *spec.Profile
	if err == nil {
		profile, err = spec.ParsePulledProfile(content)
	}
	if err != nil {
		return nil, fmt.Errorf("seccomp profile %.200q: %w", wanted.GetOciRef(), err)
	}
	return profile, nil
}
