package pod

import (
	"context"
	"crypto/sha256"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/crius-run/crius/pod/profile"
	"github.com/crius-run/crius/storage"
)

// pullKey identifies a pull. Credentials are part of it: nobody gets an image through the
// credentials of someone else.
type pullKey struct {
	image, namespace string
	credentials      [sha256.Size]byte
}

func pullKeyOf(req storage.PullRequest) (pullKey, error) {
	credentials, err := proto.MarshalOptions{Deterministic: true}.Marshal(req.Auth)
	return pullKey{req.Image, req.Namespace, sha256.Sum256(credentials)}, err
}

// Limits of pulls that no caller waits for: how long they continue, which is twice the longest
// pause of a kubelet between two tries (MaxContainerBackOff), and how many at a time.
const (
	abandonedPullTime  = 10 * time.Minute
	mostAbandonedPulls = 8
)

// PullImage pulls an image. Equal requests share one pull, which continues when its callers
// stop waiting, so that the kubelet's retry finds it under way and does not start over
// (kubernetes/kubernetes#83471). A pull that no caller asks for again ends, so that creating
// and deleting pods cannot pile up pulls.
func (e *Engine) PullImage(ctx context.Context, req storage.PullRequest) (*storage.Image, error) {
	key, err := pullKeyOf(req)
	if err != nil {
		return nil, err
	}
	return e.pulls.Do(ctx, key, func(ctx context.Context) (*storage.Image, error) {
		ctx, cancel := until(ctx, e.pulling)
		defer cancel()
		var image *storage.Image
		err := e.deps.Trace.Do(ctx, "pull image", req.Image, func(ctx context.Context) (err error) {
			image, err = e.deps.Images.Pull(ctx, req)
			return err
		})
		return image, err
	})
}

// RemoveImage removes an image with all its names (storage.Store.Remove).
func (e *Engine) RemoveImage(ctx context.Context, ref string) error {
	return e.deps.Trace.Do(ctx, "remove image", ref, func(ctx context.Context) error { return e.deps.Images.Remove(ctx, ref) })
}

// PullSecurityProfile pulls a seccomp profile for oci_ref (profile.Pull), in the same way.
func (e *Engine) PullSecurityProfile(ctx context.Context, req storage.PullRequest) (cached bool, err error) {
	key, err := pullKeyOf(req)
	if err != nil {
		return false, err
	}
	return e.profiles.Do(ctx, key, func(ctx context.Context) (cached bool, err error) {
		ctx, cancel := until(ctx, e.pulling)
		defer cancel()
		err = e.deps.Trace.Do(ctx, "pull security profile", req.Image, func(ctx context.Context) (err error) {
			cached, err = profile.Pull(ctx, e.deps.Profiles, req)
			return err
		})
		return cached, err
	})
}

// SecurityProfiles returns the pulled profiles.
func (e *Engine) SecurityProfiles() []storage.Profile { return e.deps.Profiles.List() }

// RemoveSecurityProfile removes the pulled profile with a digest, if there is one. Containers keep
// the filter that was made of it.
func (e *Engine) RemoveSecurityProfile(ctx context.Context, digest string) error {
	return e.deps.Trace.Do(ctx, "remove security profile", digest, func(ctx context.Context) error { return e.deps.Profiles.Remove(ctx, digest) })
}
