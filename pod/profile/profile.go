// Package profile loads the seccomp profiles that pods name by annotation, and pulls and loads those
// that the kubelet names: OCI artifacts in a registry (docs/decisions/0034-seccomp-artifacts.md and
// 0075-seccomp-profiles.md).
package profile

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci/spec"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/storage/registry/source"
)

// Images is the store of artifacts.
type Images interface {
	Image(ctx context.Context, ref string) (*storage.Image, error)
	Admit(ctx context.Context, use storage.Use) error
	Pull(ctx context.Context, req storage.PullRequest) (*storage.Image, error)
}

// kind has the media type and the bound of CRI-O.
var kind = source.Kind{Config: source.SeccompProfile, MaxSize: 1 << 20}

// pullTime bounds how long the creation of a container waits for a registry.
const pullTime = time.Minute

var errSlow = fmt.Errorf("the registry took longer than %s: %w", pullTime, fault.Timeout)

// Load loads the profile in the artifact that ref names, for a pod of the namespace, whose
// signature policy decides. If ref names the artifact by digest and it is in the store, the
// registry is not asked.
func Load(ctx context.Context, images Images, ref, namespace string) (*spec.Profile, error) {
	profile, err := load(ctx, images, ref, namespace)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile from OCI artifact %.200q: %w", ref, err)
	}
	return profile, nil
}

func load(ctx context.Context, images Images, ref, namespace string) (*spec.Profile, error) {
	artifact, err := find(ctx, images, ref, namespace)
	if err != nil {
		return nil, err
	}
	content, err := artifact.Content(ctx, kind)
	if err != nil {
		return nil, err
	}
	return parse(content)
}

func parse(content []byte) (*spec.Profile, error) {
	profile, err := spec.ParseProfile(content)
	if err != nil {
		return nil, err
	}
	// The runtime would connect to this path of the node as root, and hand the container over.
	if profile.ListenerPath != "" {
		return nil, fmt.Errorf("listenerPath is allowed only in profiles on the node: %w", fault.Denied)
	}
	return profile, nil
}

// find returns the artifact, and pulls it if it is not in the store.
func find(ctx context.Context, images Images, ref, namespace string) (*storage.Image, error) {
	if strings.Contains(ref, "@") {
		artifact, err := images.Image(ctx, ref)
		if err == nil && images.Admit(ctx, storage.Use{ImageID: artifact.ID, Name: ref, Namespace: namespace}) == nil {
			return artifact, nil
		} // else the registry may have the artifact, or the signatures that the policy requires
	}
	ctx, cancel := context.WithTimeoutCause(ctx, pullTime, errSlow)
	defer cancel()
	return images.Pull(ctx, storage.PullRequest{Image: ref, Namespace: namespace, Kind: &kind})
}
