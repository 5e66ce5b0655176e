// Package pull pulls images and OCI artifacts into an image store, from the request to the image.
//
// A Puller finds out what a name stands for and reaches the image (packages registry, hosts and
// source), admits it to the store (admission.go), has its layers downloaded and unpacked (copy.go,
// packages download and unpack) and makes the result durable. docs/pull.md describes all of it.
// The tests of pulls are in package storage, because they need a store.
//
// Packages progress and pullerror are leaves for everything that takes part in a pull.
package pull

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
	storagetypes "go.podman.io/storage/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/internal/poll"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/storage/pull/notice"
	"github.com/crius-run/crius/storage/pull/progress"
	"github.com/crius-run/crius/storage/pull/pullerror"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/registry/verifier"
	"github.com/crius-run/crius/storage/unpack"
	"github.com/crius-run/crius/storage/unpack/layerstore"
)

// Settings are the operator's configuration of pulls.
type Settings struct {
	Registries        registry.Config
	HostsDirs         []string // with hosts.toml files
	NamespacedAuthDir string   // empty: there is none
	DecryptionKeys    string   // directory; empty: encrypted images are refused
	TemporaryDir      string   // empty: in the store
	ParallelLayers    int      // of one image that are downloaded at a time
	UnpackParallel    int      // layers of one image that are unpacked at a time
	ProgressTimeout   time.Duration
	MinPullRate       int64 // bytes per second
	PullTimeout       time.Duration
}

// Puller pulls into one image store. Its methods are safe for concurrent use.
type Puller struct {
	Settings atomic.Pointer[Settings] // never changed in place

	Library    cstorage.Store
	Options    storagetypes.StoreOptions // of Library
	Locks      *durable.Locks            // of Library
	Leftovers  *durable.Leftovers
	Manifest   *durable.Manifest
	Artifacts  *artifact.Store
	Downloads  *download.Dir
	Policies   *trust.Policies
	Verifiers  *verifier.Verifiers
	Signatures *trust.Stored
	Counts     *progress.Counts
	Program    *unpack.Program // nil: this program is the worker of all pulls
	Cgroups    unpack.Cgroups  // of workers; nil: that of this process

	// Owned returns an error if another crius has become the owner of the store.
	Owned func() error
	// DropLost deletes the images that lost layers, so that the pull of an image with the given
	// layers does not build on the records of lost ones.
	DropLost func(ctx context.Context, layers []string) error
	// Known reports whether the store has an image or artifact of this name, by what it knew last.
	Known func(name string) bool

	RepeatRoom   int64         // see layers.NewUnpacker
	Records      RecordRoom    // in Library
	LargeWindows chan struct{} // see source.Image

	present  present
	features unpack.Features
}

// Request says what to pull and for whom.
type Request struct {
	Image     string          // name with tag or digest; a short name follows registries.conf
	Auth      *cri.AuthConfig // may be nil
	Namespace string          // of the pod; picks the signature policy
	Cgroup    string          // parent cgroup of the pod, where the image may be unpacked; empty: there is none
	Kind      *source.Kind    // of an OCI artifact: nothing else is pulled; nil: everything is
	// Into stores the artifact of the Kind elsewhere than with the images; nil: there.
	Into func(context.Context, *source.Image) (*artifact.Artifact, error)
}

// Result is what a pull has brought: an image, or an artifact.
type Result struct {
	Image    string             // id
	Artifact *artifact.Artifact // nil: it is an image
}

// Pull pulls an image or an OCI artifact, as storage.Store.Pull says, and hands it to take. If take
// returns cstorage.ErrImageUnknown, because the image was removed at once, the pull starts again.
func (p *Puller) Pull(ctx context.Context, req Request, take func(context.Context, Result) error) error {
	short, err := registry.ParseReference(req.Image)
	if err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	sysregistriesv2.InvalidateCache()
	settings := p.Settings.Load()
	names, err := registry.PullNames(settings.Registries.Context(), short)
	if err != nil {
		return fmt.Errorf("pull %s: %w", short, err)
	}
	if settings.PullTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, settings.PullTimeout, progress.ErrTooLong)
		defer cancel()
	}
	var failures []error
	for _, name := range names {
		err := p.pullFor(ctx, named{name: name, request: req, take: take})
		if err == nil {
			return nil
		}
		failures = append(failures, err)
	}
	return errors.Join(failures...)
}

// Forget makes the next pull of an image store it again, even if it is unchanged.
func (p *Puller) Forget(image string) { p.present.forget(image) }

// named is the pull of one full name.
type named struct {
	name     reference.Named
	request  Request
	take     func(context.Context, Result) error
	authFile string // empty: the configured one
	secrets  []string
	skip     int // mirrors that are not asked, from the first on
}

// pullFor pulls one full name with the credentials that the pod's namespace has for it, unless
// an annotation names the artifact: credential providers are not asked for that.
func (p *Puller) pullFor(ctx context.Context, n named) error {
	dir := p.Settings.Load().NamespacedAuthDir
	if n.request.Kind != nil && n.request.Into == nil {
		dir = ""
	}
	auth, err := registry.TakeNamespaceAuth(dir, n.request.Namespace, n.name)
	if err != nil {
		return pullerror.New(pullerror.Failed{Name: n.name}, err)
	}
	defer func() {
		if err := auth.Remove(); err != nil {
			slog.WarnContext(ctx, "cannot remove used credentials; the next start retries", "err", err)
		}
	}()
	n.authFile, n.secrets = auth.File, append(registry.Secrets(n.request.Auth), auth.Secrets...)
	ctx, end := p.Counts.Begin(ctx, n.name.String())
	defer end()
	if err := p.pullFromAny(ctx, n); err != nil {
		failed := pullerror.Failed{Name: n.name, Secrets: n.secrets}
		if pullerror.LoginRefused(err) && !source.FromMirror(err) { // mirrors get other credentials
			failed.Login = p.login(n)
		}
		return pullerror.New(failed, progress.CauseOf(ctx, err))
	}
	return nil
}

// pullFromAny pulls one full name from a mirror or its registry. As long as what a mirror sends, or
// fails to send, cannot be used, it pulls from the other sources again.
func (p *Puller) pullFromAny(ctx context.Context, n named) error {
	first := p.pullName(ctx, n)
	last := first
	for last != nil && ctx.Err() == nil && othersMayHelp(last) {
		n.skip++
		slog.WarnContext(ctx, "pull from a mirror failed, trying the next one or the registry itself",
			"image", n.name.String(), "err", pullerror.New(pullerror.Failed{Name: n.name, Secrets: n.secrets}, last))
		last = p.pullName(ctx, n)
	}
	switch kinds := pullerror.Kinds(last); {
	case last == nil || n.skip == 0:
		return last
	case len(kinds) > 0 && !slices.Contains(kinds, fault.Unavailable) && !slices.Contains(kinds, fault.Timeout): // final
		return fmt.Errorf("%w (a mirror failed before: %v)", last, first) //nolint:errorlint // a pull has one kind of failure
	}
	return fmt.Errorf("%w (the registry itself failed, too: %v)", first, last) //nolint:errorlint // a pull has one kind of failure, the first
}

// othersMayHelp reports whether a pull may have failed because of a mirror. A refusal of the
// signature policy stands.
func othersMayHelp(err error) bool {
	return source.FromMirror(err) && !errors.Is(err, trust.ErrSignature) && !errors.Is(err, pullerror.ErrWorkerDied) && !layerstore.Gone(err) &&
		!slices.Contains(pullerror.Kinds(err), fault.Exhausted)
}

// pullName pulls one full name. If the image, or one with the same layers, is removed meanwhile,
// the image is fetched again, more often if this server is removing.
func (p *Puller) pullName(ctx context.Context, n named) error {
	const attempts, whileRemoving = 3, 20
	for attempt := 1; ; attempt++ {
		before := p.Leftovers.Removals.Load()
		err := p.pullOnce(ctx, n)
		removing := p.Leftovers.Removals.Load() != before
		// The library has errors without a type for this, too. Those of a broken image are like them.
		unclear := len(pullerror.Kinds(err)) == 0 && removing && attempt < attempts
		switch {
		case err == nil, ctx.Err() != nil, !unclear && !layerstore.Gone(err):
			return err
		case attempt >= attempts && !removing, attempt == whileRemoving:
			return pullerror.Explained(fmt.Errorf("layers of the image were removed during each of %d attempts (%w): have no podman rmi, podman image prune or the like run in this store while images are pulled; the kubelet tries again: %w",
				attempt, err, fault.Unavailable))
		}
		slog.InfoContext(ctx, "layers were removed during the pull, pulling again", "image", n.name.String(), "err", err)
	}
}

func (p *Puller) pullOnce(ctx context.Context, n named) error {
	start := time.Now()
	if err := p.Locks.Await(ctx, durable.ToWrite); err != nil {
		return err
	}
	ready := p.prepare(ctx, n)
	defer ready.end(ctx)
	src, leave, err := p.reach(ctx, n)
	if err != nil {
		return err
	}
	defer leave()
	if ctx.Err() != nil { // what the registry has said ends a pull of what is present, too
		return context.Cause(ctx)
	}
	if err := n.request.Kind.Check(src.Document().Content, src.Files); err != nil {
		return err
	}
	if len(src.Files) > 0 {
		ready.end(ctx)
		return p.pullArtifact(ctx, src, n)
	}
	release, err := p.Artifacts.Reserve(src.ImageID())
	if err != nil {
		return err
	}
	defer release()
	record := p.record(src)
	if p.isPresent(ctx, src, record) {
		id := src.ImageID()
		slog.InfoContext(ctx, "image is up to date", "image", id, "name", n.name.String(), "took", time.Since(start))
		return n.take(ctx, Result{Image: id})
	}
	id, err := p.pullImage(ctx, n, src, record, ready)
	if err != nil {
		return err
	}
	warnIfForeign(ctx, n.name, id, src.Config)
	p.Counts.Took.Note(src.LayerBytes(), time.Since(start))
	slog.InfoContext(ctx, "image pulled", "image", id, "name", n.name.String(), "took", time.Since(start))
	return nil
}

// prepared is what the pull of a new image needs, as far as it can be had before the image is known.
type prepared struct {
	job    *durable.Job   // nil: there is none, or it has begun
	worker *unpack.Worker // nil: there is none
}

// prepare begins while the registry is asked what the pull of a new image needs. Most pulls of an image whose name is
// known need nothing of it.
func (p *Puller) prepare(ctx context.Context, n named) *prepared {
	if p.Program == nil || n.request.Kind != nil || p.Known(n.name.String()) {
		return &prepared{}
	}
	job, err := p.Leftovers.PreparePull(ctx, p.temporaryDir())
	if err != nil { // the pull tries again, and fails
		return &prepared{}
	}
	t := unpack.Task{Library: p.Library, Job: job.Lock, Temporary: job.Temporary, Program: p.Program, Cgroups: p.Cgroups, Pod: n.request.Cgroup}
	return &prepared{job, t.Begin(ctx)}
}

// temporaryDir returns where directories for large files are made; empty: in those of jobs.
func (p *Puller) temporaryDir() string {
	return cmp.Or(p.Settings.Load().TemporaryDir, p.Library.ImageStore())
}

// begin begins the job of a pull.
func (p *Puller) begin(ctx context.Context, src *source.Image, ready *prepared) (job *durable.Job, err error) {
	if ready.job == nil {
		if ready.job, err = p.Leftovers.PreparePull(ctx, p.temporaryDir()); err != nil {
			return nil, err
		}
	}
	if err := ready.job.Begin(ctx, src.ImageID(), durable.Needs{Layers: src.LayerIDs(), Digests: src.LayerDigests()}); err != nil {
		return nil, err
	}
	job, ready.job = ready.job, nil
	return job, nil
}

// end ends what the pull has not needed. It may be called again.
func (r *prepared) end(ctx context.Context) {
	r.worker.End(ctx)
	if job := r.job; job != nil {
		r.job = nil
		job.End(ctx, true)
	}
}

// warnIfForeign logs that an image is for another architecture. It is pulled all the same: an
// emulator may run it.
func warnIfForeign(ctx context.Context, name reference.Named, id string, config []byte) {
	var platform struct {
		Architecture string `json:"architecture"`
	}
	if json.Unmarshal(config, &platform) != nil {
		return
	}
	if foreign := source.ForeignArchitecture(platform.Architecture); foreign != "" {
		slog.WarnContext(ctx, "image is for another architecture: its programs need an emulator (binfmt_misc); if the image exists for this node's, correct its name or digest",
			"image", id, "name", name.String(), "architecture", foreign, "node", runtime.GOARCH)
	}
}

// context returns the configuration of registries for a pull, without credentials of its request.
func (p *Puller) context(n named) *types.SystemContext {
	sys := p.Settings.Load().Registries.Context()
	sys.AuthFilePath = cmp.Or(n.authFile, sys.AuthFilePath)
	return sys
}

// login says what to do about the credentials of a pull that the registry has refused.
func (p *Puller) login(n named) string {
	creds, err := registry.CredentialsFor(n.request.Auth, n.name)
	if err != nil { // and has failed the pull before any registry was asked
		return ""
	}
	return creds.Login(p.context(n), n.request.Auth, n.name, n.authFile != "")
}

// reach inspects the image in its registry. The caller must call leave.
func (p *Puller) reach(ctx context.Context, n named) (_ *source.Image, leave func(), err error) {
	sys := p.context(n)
	if err := registry.CheckBlocked(sys, n.name); err != nil {
		return nil, nil, err
	}
	dir, end, err := hosts.MakeDir(p.Library.RunRoot())
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			end()
		}
	}()
	if err := hosts.Follow(p.Settings.Load().HostsDirs, dir, sys, n.name); err != nil {
		return nil, nil, err
	}
	left, err := source.Skip(sys, n.name, n.skip, dir)
	if err != nil {
		return nil, nil, err
	}
	creds, err := registry.CredentialsFor(n.request.Auth, n.name)
	if err != nil {
		return nil, nil, err
	}
	creds.Apply(sys)
	policy, err := p.Policies.For(n.request.Namespace)
	if err != nil {
		return nil, nil, err
	}
	endListening := p.listen(ctx, sys, n)
	defer func() {
		if err != nil {
			endListening()
		}
	}()
	src, err := p.openSource(ctx, sys, policy, n.name, dir, left)
	if err != nil {
		return nil, nil, err
	}
	if _, err := p.Verifiers.Check(ctx, n.name.String(), src.Descriptor()); err != nil {
		return nil, nil, errors.Join(err, src.Close())
	}
	return src, func() { _ = src.Close(); endListening(); end() }, nil
}

// listen shows and logs, until end is called, when a registry asks the pull to wait or warns users. The
// library waits as it is asked.
func (p *Puller) listen(ctx context.Context, sys *types.SystemContext, n named) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	listening := notice.Begin(source.Sources(sys, n.name), notice.Listener{
		Wait: func(w notice.Wait) {
			slog.WarnContext(ctx, "registry asks to wait: too many requests", "registry", w.Host, "image", n.name.String(), "until", w.Until.Format(time.RFC3339))
			done := p.Counts.Throttle(ctx, w.Host, w.Until)
			go panics.Run(ctx, "show wait for registry", func() {
				defer done()
				wait := trace.Waiting{Name: "registry asks to wait", For: w.Host, Until: w.Until, Patient: true}
				_ = trace.Wait(ctx, wait, func(ctx context.Context) error { poll.Pause(ctx, time.Until(w.Until)); return nil })
			})
		},
		Warn: func(w notice.Warning) {
			if text := pullerror.Warning(w.Text, n.secrets); p.Counts.Warn(ctx, w.Host, text) {
				slog.WarnContext(ctx, "registry sent a warning", "registry", w.Host, "image", n.name.String(), "warning", text)
			}
		},
	})
	sys.DockerProxy = func(u *url.URL) (*url.URL, error) {
		listening.Asked(u)
		return http.ProxyFromEnvironment(&http.Request{URL: u}) // as the library does
	}
	return func() { listening.End(); cancel() }
}

// openSource reaches the first mirror of the name that has the image, or the registry itself, and
// inspects the image. It gives up if nothing comes. A source before others has a share of the time,
// so that a mirror that says nothing leaves some for them.
func (p *Puller) openSource(ctx context.Context, sys *types.SystemContext, policy *trust.Policy, name reference.Named, dir string, sources int) (src *source.Image, err error) {
	ctx, cancel := p.boundReach(ctx, sources)
	defer cancel()
	err = trace.Wait(ctx, trace.Waiting{Name: "ask registry", For: reference.Domain(name)}, func(ctx context.Context) (err error) {
		stored := func(config digest.Digest) []byte { return storedConfig(p.Library, config) }
		plain := func(host string) bool { return registry.Insecure(p.Settings.Load().Registries.Context(), host) }
		src, err = source.Open(ctx, sys, policy, name, stored, dir, plain)
		if err == nil {
			err = src.Unlock(ctx, p.Settings.Load().DecryptionKeys)
		}
		return err
	})
	if err != nil {
		return nil, source.Because(err, p.Counts.CauseOf(ctx, err))
	}
	return src, nil
}

// boundReach bounds the time until an image is inspected.
func (p *Puller) boundReach(ctx context.Context, sources int) (context.Context, context.CancelFunc) {
	limit, cause := p.Settings.Load().ProgressTimeout/time.Duration(sources), progress.ErrStalled
	switch {
	case limit == 0:
		return ctx, func() {}
	case sources > 1:
		cause = fmt.Errorf("%w (%s of it for a mirror)", cause, limit)
	}
	return context.WithTimeoutCause(ctx, limit, cause)
}

// pullImage brings an inspected image into the store, hands it to n.take and returns its id. record is
// that of the image in the store, or nil.
func (p *Puller) pullImage(ctx context.Context, n named, src *source.Image, record *cstorage.Image, ready *prepared) (id string, err error) {
	defer src.End()
	release, err := p.admit(src, record)
	if err != nil {
		return "", err
	}
	defer release()
	if err := p.DropLost(ctx, src.LayerIDs()); err != nil {
		return "", err
	}
	job, err := p.begin(ctx, src, ready)
	if err != nil {
		return "", err
	}
	task := unpack.Task{Secrets: n.secrets, Pod: n.request.Cgroup, Worker: ready.worker}
	err = trace.Long(ctx, "copy image", func(ctx context.Context) (err error) {
		id, err = p.copy(ctx, incoming{src, job, record == nil}, task)
		return err
	})
	ready.worker.End(ctx)
	job.End(ctx, err == nil)
	if err != nil {
		return "", src.Failed(err)
	}
	if err := p.settle(ctx, n.name, id); err != nil {
		return "", err
	}
	return id, n.take(ctx, Result{Image: id})
}

// settle removes the name from any other image or artifact, and syncs the image to disk.
func (p *Puller) settle(ctx context.Context, name reference.Named, id string) error {
	record := dropOldNames(ctx, p.Library, id)
	if err := p.Artifacts.Unname(ctx, name.String()); err != nil {
		return errors.Join(err, p.Library.RemoveNames(id, []string{name.String()})) // so that not both have it
	}
	if err := p.sync(ctx, record); err != nil {
		slog.WarnContext(ctx, "cannot write the store manifest: the next boot re-verifies the image", "image", id, "err", err)
	}
	return nil
}

// sync returns when everything is on the disk, and the store manifest says so of the image, unless
// its record is nil.
func (p *Puller) sync(ctx context.Context, record *cstorage.Image) error {
	var as fingerprint
	var err error
	if record != nil {
		as, err = fingerprintOf(p.Library, record) // before: a later change may miss the manifest
	}
	if err := trace.Do(ctx, "write store manifest", p.Manifest.Write); err != nil {
		return err
	}
	if record != nil && err == nil {
		p.present.note(record.ID, as)
	}
	return nil
}
