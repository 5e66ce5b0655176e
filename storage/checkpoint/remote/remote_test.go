package remote

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/storage/registry"
	"github.com/crius-run/crius/storage/registry/decrypt"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/storage/registry/verifier"
	"github.com/crius-run/crius/test/kit/distribution"
	testregistry "github.com/crius-run/crius/test/kit/registry"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	must(t, os.WriteFile(path, []byte(text), 0o600))
}

// noise is content that cannot be compressed.
func noise(size int) string {
	source := rand.NewChaCha8([32]byte{1})
	text := make([]byte, size)
	_, _ = source.Read(text)
	return string(text)
}

// node is a machine with a key and a configuration of registries.
type node struct {
	t       *testing.T
	dir     string
	silence time.Duration // that a registry may keep; 0: any

	recipients *decrypt.Recipients // for whom it pushes
	private    string              // path of its key
}

func newNode(t *testing.T, registries ...string) *node {
	t.Helper()
	n := &node{t: t, dir: t.TempDir()}
	var conf strings.Builder
	for _, r := range registries {
		fmt.Fprintf(&conf, "[[registry]]\nlocation = %q\ninsecure = true\n", r)
	}
	put(t, n.path("registries.conf"), conf.String())
	put(t, n.path("policy.json"), `{"default": [{"type": "insecureAcceptAnything"}]}`)
	_, err := checkpoint.NodeKey(n.dir)
	must(t, err)
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

func (n *node) access(auth *cri.AuthConfig) Access {
	n.t.Helper()
	return Access{
		Registries: registry.Config{RegistriesConf: n.path("registries.conf"), RunRoot: n.dir}, Auth: auth, Dir: n.t.TempDir(),
		Policies: trust.NewPolicies(n.path("policy.json"), ""), Verifiers: new(verifier.Verifiers), ProgressTimeout: n.silence,
		Recipients: n.recipients, Keys: func() (*decrypt.Keys, error) { return decrypt.ReadKeys(n.private, "--decrypt") },
	}
}

func (n *node) keys(files ...string) []ed25519.PublicKey {
	n.t.Helper()
	keys, err := checkpoint.TrustedKeys(n.dir, files)
	must(n.t, err)
	return keys
}

// checkpoint writes the checkpoint of a pod with one container, whose memory is large.
func (n *node) checkpoint() (dir string) {
	n.t.Helper()
	dir = n.t.TempDir()
	put(n.t, filepath.Join(dir, "c1/spec.dump"), "{}")
	put(n.t, filepath.Join(dir, "c1/dump.log"), "(00.000000) Version: 4.2.1 (gitid 0)\n")
	put(n.t, filepath.Join(dir, "c1/checkpoint/core-1.img"), "registers")
	put(n.t, filepath.Join(dir, "c1/checkpoint/pages-1.img"), noise(largeFile)+strings.Repeat("\x00", 4*largeFile))
	put(n.t, filepath.Join(dir, checkpoint.Shm), "")
	target, err := checkpoint.OpenTarget(dir)
	must(n.t, err)
	defer target.Close()
	m := checkpoint.NewPodManifest(checkpoint.PodManifest{
		Name: "web", Namespace: "default", Handler: "runc", SharedMemory: checkpoint.Shm,
		Containers: []checkpoint.PodPart{{ID: "c1", Name: "main", ImageID: "i1", ImageRef: "r.test/web@sha256:1", Directory: "c1"}},
	})
	m.Files, err = target.Digests(n.t.Context())
	must(n.t, err)
	key, err := checkpoint.NodeKey(n.dir)
	must(n.t, err)
	must(n.t, target.PutManifest(m, key, ".tmp"))
	return dir
}

func (n *node) push(ctx context.Context, auth *cri.AuthConfig, ref, dir string) (string, error) {
	n.t.Helper()
	source, err := checkpoint.OpenSource(dir, n.keys())
	must(n.t, err)
	defer source.Close()
	p, err := NewPusher(ctx, n.access(auth), ref)
	if err != nil {
		return "", err
	}
	defer p.Close()
	return p.Push(ctx, source)
}

func (n *node) pull(auth *cri.AuthConfig, ref string, keys []ed25519.PublicKey) (dir string, err error) {
	n.t.Helper()
	dir = filepath.Join(n.t.TempDir(), "pod")
	must(n.t, os.Mkdir(dir, 0o700))
	return dir, Pull(n.t.Context(), n.access(auth), ref, keys, dir)
}

// files returns the contents below a directory. Everything there must be a regular file.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if !e.Type().IsRegular() {
			t.Errorf("%s is %v", path, e.Type())
			return nil
		}
		text, err := os.ReadFile(path)
		all[strings.TrimPrefix(path, dir+"/")] = string(text)
		return err
	}))
	return all
}

func password(text string) *cri.AuthConfig {
	return &cri.AuthConfig{Username: distribution.Username, Password: text}
}

// get returns what a registry without a password has.
func get(t *testing.T, address, kind, name string) []byte {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/v2/pods/web/"+kind+"/"+name, nil)
	must(t, err)
	req.Header.Set("Accept", imagespec.MediaTypeImageManifest)
	resp, err := http.DefaultClient.Do(req)
	must(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	must(t, err)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s: %s %s", kind, name, resp.Status, text)
	}
	return text
}

// A checkpoint goes through a registry with a password, and arrives at another node, which trusts the first, as it was.
func TestPushAndPull(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, func(config distribution.Section) { config["auth"] = distribution.Htpasswd(t) })
	ref := r.Address + "/pods/web:1"
	a, b := newNode(t, r.Address), newNode(t, r.Address)
	dir := a.checkpoint()
	for what, auth := range map[string]*cri.AuthConfig{"none": nil, "wrong": password("wrong")} {
		_, err := NewPusher(t.Context(), a.access(auth), ref)
		if !errors.Is(err, fault.Unauthenticated) || !strings.Contains(err.Error(), "give some with --creds or --auth-file") || strings.Contains(err.Error(), "wrong") {
			t.Errorf("credentials %s: %v", what, err)
		}
	}
	name, err := a.push(t.Context(), password(distribution.Password), ref, dir)
	must(t, err)
	if again, err := a.push(t.Context(), password(distribution.Password), r.Address+"/pods/web:2", dir); err != nil || again != name || !strings.HasPrefix(name, r.Address+"/pods/web@sha256:") {
		t.Errorf("the same checkpoint is %s and %s, %v", name, again, err)
	}
	for _, from := range []string{ref, name} {
		got, err := b.pull(password(distribution.Password), from, b.keys(filepath.Join(a.dir, checkpoint.PublicFile)))
		if err != nil || !maps.Equal(files(t, got), files(t, dir)) {
			t.Errorf("from %s: %v, %d files", from, err, len(files(t, got)))
		}
		source, err := checkpoint.OpenSource(got, a.keys())
		must(t, err)
		source.Close()
	}
	for _, from := range []string{ref, name} {
		if got, err := b.pull(password(distribution.Password), from, b.keys()); !errors.Is(err, fault.Denied) || len(files(t, got)) != 2 {
			t.Errorf("a node that does not trust the first: %v, has %d files", err, len(files(t, got)))
		}
	}
	if _, err := b.pull(nil, ref, a.keys()); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("without a password: %v", err)
	}
}

// The artifact says what it is to people and tools.
func TestArtifact(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, nil)
	n := newNode(t, r.Address)
	_, err := n.push(t.Context(), nil, r.Address+"/pods/web", n.checkpoint())
	must(t, err)
	var m imagespec.Manifest
	must(t, json.Unmarshal(get(t, r.Address, "manifests", "latest"), &m))
	if m.ArtifactType != "application/vnd.crius.pod.checkpoint.v1" || m.Config.MediaType != "application/vnd.oci.empty.v1+json" {
		t.Errorf("the manifest is %+v", m)
	}
	titles := map[string]string{}
	for _, l := range m.Layers {
		titles[l.Annotations[imagespec.AnnotationTitle]] = l.MediaType
	}
	want := map[string]string{"manifest.json": documentLayer, "manifest.sig": documentLayer, "c1/checkpoint/pages-1.img.zst": fileLayer, "files.tar.zst": archiveLayer}
	if !maps.Equal(titles, want) {
		t.Errorf("the layers are %v", titles)
	}
	for key, want := range map[string]string{
		"org.criu.checkpoint.pod.name": "web", "org.criu.checkpoint.criu.version": "4.2.1", "checkpoint.crius.run/images": "r.test/web@sha256:1",
	} {
		if m.Annotations[key] != want {
			t.Errorf("annotation %s is %q, want %q", key, m.Annotations[key], want)
		}
	}
}

// Names that could mean something else are refused before a registry is asked.
func TestNames(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	put(t, n.path("registries.conf"), "[[registry]]\nlocation = \"blocked.test\"\nblocked = true\n")
	sum := "@" + digest.FromString("").String()
	for ref, want := range map[string]string{
		"web": "does not name a registry", "pods/web:1": "does not name a registry", "UP.test/UP": "must be lowercase", "": "invalid",
		"dir:/tmp/x": "invalid reference format", "oci-archive:x": "registries only", "r.test/web" + sum: "give a tag", "blocked.test/web": "blocks it",
	} {
		if _, err := NewPusher(t.Context(), n.access(nil), ref); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", ref, err, want)
		}
	}
}

// What changes while it is pushed is noticed, and no artifact is made.
func TestPushOfChangedFile(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, nil)
	n := newNode(t, r.Address)
	for _, name := range []string{"c1/checkpoint/pages-1.img", "c1/spec.dump"} {
		dir := n.checkpoint()
		text, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		source, err := checkpoint.OpenSource(dir, n.keys())
		must(t, err)
		text[0]++
		put(t, filepath.Join(dir, name), string(text))
		p, err := NewPusher(t.Context(), n.access(nil), r.Address+"/pods/web:1")
		must(t, err)
		if _, err := p.Push(t.Context(), source); !errors.Is(err, fault.Denied) || !strings.Contains(err.Error(), name+" is not the file that was signed for") || strings.Contains(err.Error(), "/uploads/") {
			t.Errorf("%s: %v", name, err)
		}
		p.Close()
		source.Close()
	}
	if _, err := n.pull(nil, r.Address+"/pods/web:1", n.keys()); !errors.Is(err, fault.NotFound) {
		t.Errorf("the artifact: %v", err)
	}
}

// A push that is interrupted while the memory goes ends, and makes no artifact.
func TestInterruptedPush(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, nil)
	front := r.Front()
	n := newNode(t, front.Addr(), r.Address)
	ctx, cancel := context.WithCancel(t.Context())
	front.Inject(testregistry.Fault{Path: "/blobs/uploads/", Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.Method != http.MethodPatch || req.ContentLength >= 0 {
				answer.ServeHTTP(w, req)
				return
			}
			_, _ = io.CopyN(io.Discard, req.Body, 1000)
			cancel()
			select {
			case <-req.Context().Done():
			case <-stop:
			}
		})
	}})
	if _, err := n.push(ctx, nil, front.Addr()+"/pods/web:1", n.checkpoint()); !errors.Is(err, context.Canceled) {
		t.Errorf("push: %v", err)
	}
	if _, err := n.pull(nil, r.Address+"/pods/web:1", n.keys()); !errors.Is(err, fault.NotFound) {
		t.Errorf("the artifact: %v", err)
	}
}

// A transfer ends when the registry is silent for too long, whatever it was about to say or to take. What it owes is
// counted, not how long the transfer takes, nor what this node needs for itself.
func TestSilence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		a := Access{ProgressTimeout: limit}
		for _, pause := range []time.Duration{limit - 1, limit + 1} {
			err := a.unlessSilent(t.Context(), func(ctx context.Context, s silence) error {
				slow := readerFunc(func(p []byte) (int, error) { time.Sleep(pause); return 1, ctx.Err() })
				s.end()
				for range 5 {
					if _, err := (received{s, slow}).Read(make([]byte, 1)); err != nil {
						return err
					}
					time.Sleep(2 * limit) // as if the disk were slow
				}
				return nil
			})
			if silent := pause > limit; errors.Is(err, fault.Timeout) != silent || err != nil != silent {
				t.Errorf("silent for %s: %v", pause, err)
			}
			err = a.unlessSilent(t.Context(), func(ctx context.Context, s silence) error {
				slow := readerFunc(func(p []byte) (int, error) { time.Sleep(2 * limit); return 1, nil })
				for range 5 {
					_, _ = sent{s, slow}.Read(make([]byte, 1))
					time.Sleep(pause) // until the registry takes it
				}
				return ctx.Err()
			})
			if silent := pause > limit; errors.Is(err, fault.Timeout) != silent || err != nil != silent {
				t.Errorf("takes nothing for %s: %v", pause, err)
			}
		}
		if err := (Access{}).unlessSilent(t.Context(), func(ctx context.Context, s silence) error {
			s.begin()
			time.Sleep(1e6 * limit)
			s.end()
			return ctx.Err()
		}); err != nil {
			t.Errorf("without a limit: %v", err)
		}
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// A registry that goes silent does not hold up a push or a pull for ever.
func TestSilentRegistry(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, nil)
	n := newNode(t, r.Address)
	keys := n.keys()
	_, err := n.push(t.Context(), nil, r.Address+"/pods/web:1", n.checkpoint())
	must(t, err)
	var m imagespec.Manifest
	must(t, json.Unmarshal(get(t, r.Address, "manifests", "1"), &m))
	deaf := func(method string) testregistry.Action {
		return func(answer http.Handler, stop <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if req.Method != method {
					answer.ServeHTTP(w, req)
					return
				}
				_, _ = io.CopyN(io.Discard, req.Body, 1000)
				select {
				case <-req.Context().Done():
				case <-stop:
				}
			})
		}
	}
	for name, f := range map[string]testregistry.Fault{
		"pull: first answer":   {Path: "/v2/", Do: testregistry.Stall(0)},
		"pull: manifest":       {Path: "/manifests/", Do: testregistry.Stall(10)},
		"pull: signed":         {Path: m.Layers[0].Digest.String(), Do: testregistry.Stall(10)},
		"pull: memory":         {Path: m.Layers[2].Digest.String(), Do: testregistry.Stall(1000)},
		"pull: begin of blob":  {Path: m.Layers[2].Digest.String(), Do: testregistry.Stall(0)},
		"push: first answer":   {Path: "/v2/", Do: testregistry.Stall(0)},
		"push: upload":         {Path: "/blobs/uploads/", Do: deaf(http.MethodPost)},
		"push: memory":         {Path: "/blobs/uploads/", Do: deaf(http.MethodPatch)},
		"push: end of a layer": {Path: "/blobs/uploads/", Do: deaf(http.MethodPut)},
		"push: manifest":       {Path: "/manifests/", Do: deaf(http.MethodPut)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			front := r.Front()
			front.Inject(f)
			n := newNode(t, front.Addr())
			n.silence = time.Second
			ref := front.Addr() + "/pods/web:1"
			var err error
			if strings.HasPrefix(name, "pull") {
				_, err = n.pull(nil, ref, keys)
			} else {
				_, err = n.push(t.Context(), nil, front.Addr()+"/pods/other:1", n.checkpoint())
			}
			if !errors.Is(err, fault.Timeout) || !strings.Contains(err.Error(), "image.progress_timeout") {
				t.Errorf("%v", err)
			}
		})
	}
}

// A checkpoint comes from a mirror as an image does, and is subject to the signature policy and to image verifiers.
func TestPullFollowsTheConfigurationOfPulls(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, nil)
	first, n := newNode(t, r.Address), newNode(t)
	dir, keys := first.checkpoint(), first.keys()
	_, err := first.push(t.Context(), nil, r.Address+"/pods/web:1", dir)
	must(t, err)
	put(t, n.path("registries.conf"), fmt.Sprintf("[[registry]]\nlocation = \"example.test\"\n[[registry.mirror]]\nlocation = %q\ninsecure = true\n", r.Address))
	if got, err := n.pull(nil, "example.test/pods/web:1", keys); err != nil || !maps.Equal(files(t, got), files(t, dir)) {
		t.Errorf("from a mirror: %v", err)
	}

	a := n.access(nil)
	put(t, n.path("verifiers/no"), "#!/bin/sh\necho not today\nexit 1\n")
	must(t, os.Chmod(n.path("verifiers/no"), 0o700))
	a.Verifiers.Use(n.path("verifiers"), time.Minute)
	refused := t.TempDir()
	if err := Pull(t.Context(), a, "example.test/pods/web:1", keys, refused); !errors.Is(err, trust.ErrSignature) || !strings.Contains(err.Error(), "not today") || len(files(t, refused)) > 0 {
		t.Errorf("refused by a verifier: %v", err)
	}
	put(t, n.path("policy.json"), `{"default": [{"type": "reject"}]}`)
	if got, err := n.pull(nil, "example.test/pods/web:1", keys); !errors.Is(err, trust.ErrSignature) || len(files(t, got)) > 0 {
		t.Errorf("refused by the policy: %v", err)
	}
}
