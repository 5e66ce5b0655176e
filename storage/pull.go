package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/unpack"
)

// PullRequest is what to pull and for whom.
type PullRequest struct {
	Image     string          // name with tag or digest; a short name follows registries.conf
	Auth      *cri.AuthConfig // may be nil
	Namespace string          // of the pod; picks the signature policy
	Cgroup    string          // parent cgroup of the pod, where the image may be unpacked; empty: there is none
	Kind      *source.Kind    // of an OCI artifact, which is all that is pulled; nil: everything is
}

// Pull fetches an image or an OCI artifact and returns it. An image that is here
// with the same digest is not fetched again. registries.conf and the signature
// policy are read at every pull.
//
// The error says fault.NotFound, Unauthenticated, Denied (a policy, a block or
// the registry; ErrSignature where it was the signature policy), Unavailable,
// Timeout, Exhausted (disk full), Invalid (the request, or an image that no
// retry will make good) or Precondition (the node's configuration); its text
// never contains credentials. A pull that fails or whose ctx ends leaves nothing
// in the store; what it has downloaded is kept for a while, for the next one. After one
// that succeeds the image survives a power cut.
func (s *Store) Pull(ctx context.Context, req PullRequest) (*Image, error) {
	short, err := registry.ParseReference(req.Image)
	if err != nil {
		return nil, fmt.Errorf("pull: %w", err)
	}
	sysregistriesv2.InvalidateCache()
	names, err := registry.PullNames(s.registries().Context(), short)
	if err != nil {
		return nil, fmt.Errorf("pull %s: %w", short, err)
	}
	if s.cfg.PullTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, s.cfg.PullTimeout, progress.ErrTooLong)
		defer cancel()
	}
	var failures []error
	for _, name := range names {
		image, err := s.pullFor(ctx, name, req)
		if err == nil {
			return image, nil
		}
		failures = append(failures, err)
	}
	return nil, errors.Join(failures...)
}

// pullFor pulls one full name with the credentials that the pod's namespace has for it, unless
// only a kind of artifacts is wanted: credential providers are asked for images alone.
func (s *Store) pullFor(ctx context.Context, name reference.Named, req PullRequest) (*Image, error) {
	dir := s.cfg.NamespacedAuthDir
	if req.Kind != nil {
		dir = ""
	}
	auth, err := registry.TakeNamespaceAuth(dir, req.Namespace, name)
	if err != nil {
		return nil, pullerror.New(name.String(), err, nil)
	}
	defer func() {
		if err := auth.Remove(); err != nil {
			slog.WarnContext(ctx, "cannot remove used credentials; the next start retries", "err", err)
		}
	}()
	p := pull{name: name, request: req, authFile: auth.File, secrets: append(registry.Secrets(req.Auth), auth.Secrets...)}
	image, err := s.pullName(ctx, p)
	if err != nil {
		return nil, pullerror.New(name.String(), progress.CauseOf(ctx, err), p.secrets)
	}
	return image, nil
}

// pull is one of a full name.
type pull struct {
	name     reference.Named
	request  PullRequest
	authFile string // instead of the configured one; empty: that
	secrets  []string
}

// worker is what the process that unpacks the image has to do with the pull.
func (p pull) worker() unpack.Task { return unpack.Task{Secrets: p.secrets, Pod: p.request.Cgroup} }

// pullName pulls one full name. Somebody may remove the image, or one with the
// same layers, while it comes in; then it is fetched again, the more often if that was
// this server.
func (s *Store) pullName(ctx context.Context, p pull) (*Image, error) {
	const attempts, whileRemoving = 3, 20
	for attempt := 1; ; attempt++ {
		before := s.leftovers.Removals.Load()
		image, err := s.pullOnce(ctx, p)
		removing := s.leftovers.Removals.Load() != before
		if err == nil || ctx.Err() != nil || attempt >= attempts && !removing || attempt == whileRemoving {
			return image, err
		}
		unclear := len(pullerror.Kinds(err)) == 0 && removing // the library has errors without a type for this, too
		if !unclear && !removedMeanwhile(err) {
			return image, err
		}
		slog.InfoContext(ctx, "layers were removed during the pull, pulling again", "image", p.name.String(), "err", err)
	}
}

func removedMeanwhile(err error) bool {
	for _, gone := range []error{
		cstorage.ErrLayerUnknown, cstorage.ErrImageUnknown, cstorage.ErrParentUnknown,
		cstorage.ErrNotAnImage, cstorage.ErrNotALayer, cstorage.ErrNotAnID,
	} {
		if errors.Is(err, gone) {
			return true
		}
	}
	return false
}

func (s *Store) pullOnce(ctx context.Context, p pull) (*Image, error) {
	name, start := p.name, time.Now()
	if err := s.locks.Await(ctx, durable.ToWrite); err != nil {
		return nil, err
	}
	sys := s.registries().Context()
	sys.AuthFilePath = cmp.Or(p.authFile, sys.AuthFilePath)
	if err := registry.CheckBlocked(sys, name); err != nil {
		return nil, err
	}
	dir, end, err := hosts.MakeDir(s.store.RunRoot())
	if err != nil {
		return nil, err
	}
	defer end()
	if err := hosts.Follow(s.cfg.HostsDirs, dir, sys, name); err != nil {
		return nil, err
	}
	creds, err := registry.CredentialsFor(p.request.Auth, name)
	if err != nil {
		return nil, err
	}
	creds.Apply(sys)
	policy, err := s.policies.For(p.request.Namespace)
	if err != nil {
		return nil, err
	}
	src, err := s.openSource(ctx, sys, policy, name, dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = src.Close() }()
	if err := p.request.Kind.Check(src.Document().Content, src.Files); err != nil {
		return nil, err
	}
	if len(src.Files) > 0 {
		return s.artifacts.pull(ctx, src)
	}
	release, err := s.artifacts.Reserve(src.ImageID())
	if err != nil {
		return nil, err
	}
	defer release()
	if s.isPresent(ctx, src) {
		id := src.ImageID()
		slog.InfoContext(ctx, "image is up to date", "image", id, "name", name.String(), "took", time.Since(start))
		return s.pulled(ctx, id)
	}
	defer src.End()
	added, err := s.bound(src)
	if err != nil {
		return nil, err
	}
	defer added()
	if err := s.dropLost(ctx); err != nil {
		return nil, err
	}
	job, err := s.leftovers.BeginPull(ctx, src.ImageID(), cmp.Or(s.cfg.TemporaryDir, s.store.ImageStore()), durable.Needs{Layers: src.LayerIDs(), Digests: src.LayerDigests()})
	if err != nil {
		return nil, err
	}
	id, err := trace.Get(ctx, "copy image", func(ctx context.Context) (string, error) { return s.copy(ctx, src, job, p.worker()) })
	job.End(ctx, err == nil)
	if err != nil {
		return nil, err
	}
	if err := p.settle(ctx, s, id); err != nil {
		return nil, err
	}
	image, err := s.pulled(ctx, id)
	if err != nil {
		return nil, err
	}
	slog.InfoContext(ctx, "image pulled", "image", image.ID, "name", name.String(), "took", time.Since(start))
	return image, nil
}

// bound refuses an image that would take too much of the store, and bounds what its layers take
// as they come. Call release when the pull has ended.
func (s *Store) bound(src *source.Image) (release func(), err error) {
	if err := errors.Join(source.CheckRecord(s.store, src), crowded(s.store, src)); err != nil {
		return nil, err
	}
	room, err := layerRoom(s.store)
	if err != nil {
		return nil, err
	}
	src.AllowExpansion(room)
	src.LargeWindows = s.largeWindows
	return s.records.reserve(s.store, src)
}

// settle makes the name of the pull mean the image alone, and brings the image to the disk.
func (p pull) settle(ctx context.Context, s *Store, id string) error {
	dropOldNames(ctx, s.store, id)
	if err := s.artifacts.Unname(ctx, p.name.String()); err != nil {
		return errors.Join(err, s.store.RemoveNames(id, []string{p.name.String()})) // so that not both have it
	}
	if err := s.sync(ctx, id); err != nil {
		slog.WarnContext(ctx, "cannot write the store manifest: the next boot re-verifies the image", "image", id, "err", err)
	}
	return nil
}

// openSource reaches the first of the name's mirrors, or the registry itself, that has the
// image, and inspects it. It gives up where nothing comes.
func (s *Store) openSource(ctx context.Context, sys *types.SystemContext, policy *trust.Policy, name reference.Named, dir string) (*source.Image, error) {
	if s.cfg.ProgressTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, s.cfg.ProgressTimeout, progress.ErrStalled)
		defer cancel()
	}
	src, err := source.Open(ctx, sys, policy, name, func(config digest.Digest) []byte { return storedConfig(s.store, config) }, dir)
	if err == nil {
		err = src.Unlock(ctx, s.cfg.DecryptionKeysPath)
	}
	return src, progress.CauseOf(ctx, err)
}

// sync returns when what was pulled is on the disk, and on record as being there.
func (s *Store) sync(ctx context.Context, id string) error {
	var as fingerprint
	record, err := s.store.Image(id)
	if err == nil {
		as, err = fingerprintOf(s.store, record) // before: what comes later may miss the manifest
	}
	if err := trace.Do(ctx, "write store manifest", s.manifest.Write); err != nil {
		return err
	}
	if err == nil {
		s.present.note(id, as)
	}
	return nil
}

// pulled is the image that a pull has brought. It is wanted from now on, even
// if it was removed before and lives on only because containers use it.
func (s *Store) pulled(ctx context.Context, id string) (*Image, error) {
	if err := s.holds.revive(ctx, id); err != nil {
		return nil, err
	}
	image, err := s.images.find(ctx, id)
	if err != nil || image != nil {
		return image, err
	}
	return nil, fmt.Errorf("image %s: %w: it was removed as soon as it was pulled", id, cstorage.ErrImageUnknown)
}

// dropLost deletes the images that lost layers, so that what is pulled next
// does not build on the records of those layers. An image that was made on this
// machine is left to a person.
func (s *Store) dropLost(ctx context.Context) error {
	lost, err := s.images.lost(ctx)
	if err != nil {
		return err
	}
	for _, id := range lost {
		if err := s.dropIfLost(ctx, id); err != nil {
			slog.WarnContext(ctx, "cannot delete image with missing layers", "image", id, "err", err)
		}
	}
	return nil
}

func (s *Store) dropIfLost(ctx context.Context, id string) error {
	record, err := s.store.Image(id)
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return nil
	}
	if err != nil {
		return err
	}
	if record.ReadOnly || !durable.FromRegistry(record) {
		return nil
	}
	if err := durable.ImageUsable(s.store, id); !errors.Is(err, durable.ErrLayersLost) {
		return err // nil: it was mended
	}
	if err := s.holds.expire(ctx, id); err != nil {
		return err
	}
	s.leftovers.Removals.Add(1)
	err = trace.Call(ctx, "delete image", func() error { return durable.DeleteImage(s.store, id) })
	if err == nil {
		s.images.forget(id)
		slog.WarnContext(ctx, "image with missing layers deleted; it will be pulled again when needed", "image", id)
	}
	return err
}
