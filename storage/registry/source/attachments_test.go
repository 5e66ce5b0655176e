package source

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	libimage "go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// attach puts attachments with these payloads beside an image.
func attach(t *testing.T, r *registry.Registry, repo string, of digest.Digest, payloads ...string) {
	t.Helper()
	artifact := &image.Artifact{MediaType: imagespec.MediaTypeImageManifest, Blobs: map[digest.Digest][]byte{}}
	m := imagespec.Manifest{MediaType: artifact.MediaType, Config: imagespec.DescriptorEmptyJSON}
	m.SchemaVersion = 2
	for i, payload := range payloads {
		d := digest.FromString(payload)
		artifact.Blobs[d] = []byte(payload)
		m.Layers = append(m.Layers, imagespec.Descriptor{
			MediaType: "application/vnd.dev.cosign.simplesigning.v1+json", Digest: d, Size: int64(len(payload)),
			Annotations: map[string]string{"number": fmt.Sprint(i), "html": "<&>"},
		})
	}
	var err error
	if artifact.Manifest, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	r.Push(repo, "sha256-"+of.Encoded()+".sig", artifact)
}

func small(t *testing.T) *image.Artifact {
	t.Helper()
	l, err := image.NewLayer(image.Text("file", "text"))
	if err != nil {
		t.Fatal(err)
	}
	a, err := image.Image{Layers: []image.Layer{l}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// machine is how the library is configured: files below a directory.
type machine struct {
	t   *testing.T
	dir string
}

func newMachine(t *testing.T, registriesConf, registriesD string) *machine {
	t.Helper()
	m := &machine{t, t.TempDir()}
	m.write("registries.conf", registriesConf)
	m.write("registries.d/a.yaml", registriesD)
	m.write("policy.json", `{"default": [{"type": "insecureAcceptAnything"}]}`)
	return m
}

func (m *machine) write(name, content string) {
	m.t.Helper()
	name = filepath.Join(m.dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) context() *types.SystemContext {
	return &types.SystemContext{
		SystemRegistriesConfPath:    filepath.Join(m.dir, "registries.conf"),
		SystemRegistriesConfDirPath: filepath.Join(m.dir, "registries.conf.d"),
		RegistriesDirPath:           filepath.Join(m.dir, "registries.d"),
		AuthFilePath:                filepath.Join(m.dir, "auth.json"),
		BlobInfoCacheDir:            filepath.Join(os.DevNull, "none"),
		DockerAuthConfig:            &types.DockerAuthConfig{Username: "user", Password: "password"},
	}
}

// library are the signatures that the library itself reads.
func (m *machine) library(name string) ([][]byte, error) {
	m.t.Helper()
	ref, err := docker.ParseReference("//" + name)
	if err != nil {
		m.t.Fatal(err)
	}
	src, err := ref.NewImageSource(m.t.Context(), m.context())
	if err != nil {
		return nil, err
	}
	defer src.Close()
	found, err := libimage.UnparsedInstance(src, nil).UntrustedSignatures(m.t.Context())
	blobs, _ := trust.Blobs(found)
	return blobs, err
}

// signatures returns the signatures that crius reads.
func (m *machine) signatures(name string) ([][]byte, error) {
	m.t.Helper()
	policy, err := trust.NewPolicies(filepath.Join(m.dir, "policy.json"), "").For("")
	if err != nil {
		m.t.Fatal(err)
	}
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		m.t.Fatal(err)
	}
	img, err := Open(m.t.Context(), m.context(), policy, named, func(digest.Digest) []byte { return nil }, m.t.TempDir(), nil)
	if err != nil {
		return nil, err
	}
	defer img.Close()
	return img.Signatures, nil
}

const (
	attachmentsOn  = "default-docker: {use-sigstore-attachments: true}\n"
	attachmentsOff = "default-docker: {use-sigstore-attachments: false}\n"
)

// registryAt and mirrorAt are entries of registries.conf.
func registryAt(prefix, location string) string {
	return fmt.Sprintf("[[registry]]\nprefix = %q\nlocation = %q\ninsecure = true\n", prefix, location)
}

func mirrorAt(location string) string {
	return fmt.Sprintf("[[registry.mirror]]\nlocation = %q\ninsecure = true\n", location)
}

// Attachments come from where the library would have them from, after the signatures of a
// lookaside, and no mirror is given the registry's credentials.
func TestAttachmentsAreThoseThatTheLibraryReads(t *testing.T) {
	t.Parallel()
	a := small(t)
	home, mirror, empty := registrytest.Start(t), registrytest.StartAt(t, "127.0.0.2:0"), registrytest.StartAt(t, "127.0.0.3:0")
	for _, r := range []*registry.Registry{home, mirror} {
		r.Push("app", "1", a)
		attach(t, r, "app", a.Digest(), "first of "+r.Addr(), "second of "+r.Addr())
		r.Push("bare", "1", a)
	}
	attach(t, home, "bare", a.Digest(), "of home alone")
	home.Require(registry.Auth{Username: "user", Password: "password"})
	empty.Require(registry.Auth{Username: "user", Password: "password"})
	only := func(r *registry.Registry) string {
		return "docker: {'" + r.Addr() + "': {use-sigstore-attachments: true}}\n"
	}
	const dead, byDigest = "127.0.0.1:1", "pull-from-mirror = \"digest-only\"\n"
	here := registryAt(home.Addr(), home.Addr())
	digested := "app@" + a.Digest().String()
	for _, c := range []struct {
		what, conf, locations, image string
		count                        int
	}{
		{"off", here, attachmentsOff, "app:1", 0},
		{"on", here, attachmentsOn, "app:1", 2},
		{"by digest", here, attachmentsOn, digested, 2},
		{"for the registry alone", here, only(home), "app:1", 2},
		{"off for the repository", here, attachmentsOn + "docker: {'" + home.Addr() + "/app': {use-sigstore-attachments: false}}\n", "app:1", 0},
		{"mirror", here + mirrorAt(mirror.Addr()), attachmentsOn, "app:1", 2},
		{"mirror without attachments", here + mirrorAt(mirror.Addr()), attachmentsOn, "bare:1", 0},
		{"mirror for which it is off", here + mirrorAt(mirror.Addr()), only(home), "app:1", 0},
		{"mirror for which alone it is on", here + mirrorAt(mirror.Addr()), only(mirror), "app:1", 2},
		{"mirror for digests", here + mirrorAt(mirror.Addr()) + byDigest, attachmentsOn, digested, 2},
		{"mirror for digests, by tag", here + mirrorAt(mirror.Addr()) + byDigest, attachmentsOn, "app:1", 2},
		{"mirror without the image", here + mirrorAt(empty.Addr()), attachmentsOn, "app:1", 2},
		{"mirror that is blocked", here + mirrorAt(mirror.Addr()) + registryAt(mirror.Addr(), mirror.Addr()) + "blocked = true\n", attachmentsOn, "app:1", 2},
		{"dead mirror", here + mirrorAt(dead), attachmentsOn, "app:1", 2},
		{"mirror of a dead registry", registryAt(home.Addr(), dead) + mirrorAt(mirror.Addr()), attachmentsOn, "app:1", 2},
		{"remapped", registryAt(home.Addr(), mirror.Addr()), attachmentsOn, "app:1", 2},
	} {
		for _, lookaside := range []string{"", "a signature"} {
			m := newMachine(t, c.conf, c.locations)
			if lookaside != "" {
				m.write("registries.d/a.yaml", strings.Replace(c.locations, "{use-", "{lookaside: 'file://"+m.dir+"/lookaside', use-", 1))
				m.write("lookaside/app@sha256="+a.Digest().Encoded()+"/signature-1", "\x00simple-signing\n"+lookaside)
			}
			want, err := m.library(home.Addr() + "/" + c.image)
			if err != nil {
				t.Fatalf("%s: %v", c.what, err)
			}
			got, err := m.signatures(home.Addr() + "/" + c.image)
			if err != nil || !slices.EqualFunc(got, want, bytes.Equal) {
				t.Errorf("%s: %q, %v; the library has %q", c.what, got, err, want)
			}
			if n := bytes.Count(bytes.Join(got, nil), []byte("\x00sigstore-json\n")); n != c.count {
				t.Errorf("%s: %d attachments, want %d", c.what, n, c.count)
			}
		}
	}
	for _, request := range append(mirror.Requests(), empty.Requests()...) {
		if strings.Contains(request.Authorization, base64.StdEncoding.EncodeToString([]byte("user:password"))) {
			t.Errorf("the mirror %s was given the registry's credentials", request.Host)
		}
	}
}

// Attachments come from the image's registry, whatever URLs their layers name
// (CVE-2020-15157).
func TestAttachmentsAreNotForeign(t *testing.T) {
	t.Parallel()
	a := small(t)
	r, foreign := registrytest.Start(t), registrytest.StartAt(t, "127.0.0.2:0")
	r.Push("app", "1", a)
	attach(t, r, "app", a.Digest(), "payload")
	r.Inject(registry.Fault{Path: ".sig", Do: registry.Replace(func(text []byte) []byte {
		return bytes.ReplaceAll(text, []byte(`"annotations"`), []byte(`"urls":["http://`+foreign.Addr()+`/"],"annotations"`))
	})})
	got, err := newMachine(t, registryAt(r.Addr(), r.Addr()), attachmentsOn).signatures(r.Addr() + "/app:1")
	if err != nil || len(got) != 1 || len(foreign.Requests()) > 0 {
		t.Errorf("%q, %v; the foreign server was asked %d times", got, err, len(foreign.Requests()))
	}
}

// A mirror is asked for attachments as it is for images.
func TestAttachmentsThroughNamespaceProxy(t *testing.T) {
	t.Parallel()
	a := small(t)
	r := registrytest.Start(t)
	r.Push("app", "1", a)
	attach(t, r, "app", a.Digest(), "payload")
	m := newMachine(t, registryAt("example.org", "127.0.0.1:1")+mirrorAt(r.Addr())+"namespace-proxy = \"example.org\"\n", attachmentsOn)
	if got, err := m.signatures("example.org/app:1"); err != nil || len(got) != 1 {
		t.Errorf("%q, %v", got, err)
	}
	for _, request := range r.Requests() {
		if request.Path != "/v2/" && request.Query != "ns=example.org" {
			t.Errorf("asked for %s?%s", request.Path, request.Query)
		}
	}
}

// A registry without attachments is distinguished from one that does not answer, as in the library.
func TestAttachmentsThatCannotBeRead(t *testing.T) {
	t.Parallel()
	a := small(t)
	said := func(status int, mediaType, body string) registry.Action {
		return func(http.Handler, <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", mediaType)
				w.WriteHeader(status)
				fmt.Fprint(w, body)
			})
		}
	}
	for _, c := range []struct {
		what, path string
		do         registry.Action
		fails      bool
	}{
		{"500", ".sig", registry.Page(500), true},
		{"403", ".sig", registry.Status(403), true},
		{"404", ".sig", registry.Status(404), false},
		{"a page", ".sig", registry.Page(404), false},
		{"Harbor", ".sig", said(404, "application/json", `{"errors":[{"code":"UNKNOWN","message":"artifact not found"}]}`), false},
		{"nonsense", ".sig", registry.Replace(func([]byte) []byte { return []byte("nonsense") }), true},
		{"another type", ".sig", said(200, manifest.DockerV2Schema2MediaType, string(a.Manifest)), true},
		{"blob 500", digest.FromString("payload").Encoded(), registry.Page(500), true},
		{"blob 404", digest.FromString("payload").Encoded(), registry.Status(404), true},
		{"blob corrupt", digest.FromString("payload").Encoded(), registry.Replace(registry.Corrupt), true},
	} {
		r := registrytest.Start(t)
		r.Push("app", "1", a)
		attach(t, r, "app", a.Digest(), "payload")
		r.Inject(registry.Fault{Path: c.path, Do: c.do})
		m := newMachine(t, registryAt(r.Addr(), r.Addr()), attachmentsOn)
		want, libraryErr := m.library(r.Addr() + "/app:1")
		got, err := m.signatures(r.Addr() + "/app:1")
		if (libraryErr != nil) != c.fails || (err != nil) != c.fails || len(got) != len(want) {
			t.Errorf("%s: %q, %v; the library %q, %v; want failure %t", c.what, got, err, want, libraryErr, c.fails)
		}
	}
}
