package storage

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/storage/registry/trust"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// useAttachments has a registries.d that wants attachments of all images. It is found by
// the environment, so the test cannot be parallel.
func useAttachments(t *testing.T) {
	t.Helper()
	home := t.TempDir()
	dir := filepath.Join(home, "containers/registries.d")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte("default-docker:\n  use-sigstore-attachments: true\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_CONFIG_HOME", home)
}

// attached is an artifact with signatures, as cosign attaches them. What has no content is
// left out of its blobs.
type attached struct {
	layers []imagespec.Descriptor
	blobs  map[digest.Digest][]byte
}

func (a *attached) add(payload []byte, annotations map[string]string) {
	if a.blobs == nil {
		a.blobs = map[digest.Digest][]byte{}
	}
	d := digest.FromBytes(payload)
	a.blobs[d] = payload
	a.layers = append(a.layers, imagespec.Descriptor{
		MediaType: "application/vnd.dev.cosign.simplesigning.v1+json", Digest: d, Size: int64(len(payload)), Annotations: annotations,
	})
}

// sign adds a signature.
func (a *attached) sign(s *sigstoreSigner, name string, of digest.Digest) {
	s.t.Helper()
	var parts struct {
		Payload     []byte
		Annotations map[string]string
	}
	if err := json.Unmarshal(bytes.TrimPrefix(s.sign(name, of), []byte("\x00sigstore-json\n")), &parts); err != nil {
		s.t.Fatal(err)
	}
	a.add(parts.Payload, parts.Annotations)
}

func (a *attached) push(t *testing.T, r *registry.Registry, repo string, of digest.Digest) {
	t.Helper()
	m := imagespec.Manifest{MediaType: imagespec.MediaTypeImageManifest, Config: imagespec.DescriptorEmptyJSON, Layers: a.layers}
	m.SchemaVersion = 2
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	r.Push(repo, attachmentTag(of), &image.Artifact{MediaType: m.MediaType, Manifest: text, Blobs: a.blobs})
}

func attachmentTag(of digest.Digest) string { return "sha256-" + of.Encoded() + ".sig" }

// Signatures that are attached to an image in its registry count at the pull and later.
func TestAttachedSignatures(t *testing.T) {
	useAttachments(t)
	s, other := newSigstoreSigner(t), newSigstoreSigner(t)
	n := newNode(t, func(c *Options) { c.HostsDirs = []string{filepath.Join(filepath.Dir(c.Root), "certs.d")} })
	n.write("policy.json", `{"default": [`+s.rule("matchRepository")+`]}`)
	home, mirror := registrytest.Start(t), registrytest.StartAt(t, "127.0.0.2:0")
	signed, unsigned, foreign := motd(t, "signed"), motd(t, "unsigned"), motd(t, "signed by somebody")
	of := home.Addr() + "/app"
	for _, r := range []*registry.Registry{home, mirror} {
		for tag, a := range map[string]*image.Artifact{"signed": signed, "index": index(t, signed), "unsigned": unsigned, "foreign": foreign} {
			r.Push("app", tag, a)
		}
		var right, wrong attached
		right.sign(other, of, signed.Digest())
		right.sign(s, of, signed.Digest())
		right.push(t, r, "app", signed.Digest())
		wrong.sign(other, of, foreign.Digest())
		wrong.push(t, r, "app", foreign.Digest())
	}
	dead := "127.0.0.1:1"
	hostsFile := filepath.Join(n.dir, "certs.d", home.Addr(), "hosts.toml")
	for what, configure := range map[string]func(){
		"registry": func() { n.write("registries.conf", insecure("127.0.0.1")) },
		"mirror": func() {
			n.write("registries.conf", registryEntry(home.Addr(), dead)+"[[registry.mirror]]\nlocation = \""+mirror.Addr()+"\"\ninsecure = true\n")
		},
		"hosts.toml": func() {
			n.write("registries.conf", "")
			if err := os.MkdirAll(filepath.Dir(hostsFile), 0o700); err != nil {
				t.Fatal(err)
			}
			n.write(strings.TrimPrefix(hostsFile, n.dir), "server = \"http://"+dead+"\"\n[host.\"http://"+mirror.Addr()+"\"]\n")
		},
	} {
		configure()
		for _, image := range []string{of + ":signed", of + ":index", of + "@" + signed.Digest().String()} {
			img, err := n.Pull(testContext(t), PullRequest{Image: image})
			if err != nil {
				t.Errorf("%s: %v", what, err)
				continue
			}
			if err := n.Admit(testContext(t), Use{ImageID: img.ID, Name: image}); err != nil {
				t.Errorf("%s: used as %s: %v", what, image, err)
			}
			n.remove(img.ID)
		}
		for _, tag := range []string{":unsigned", ":foreign"} {
			_, err := n.Pull(testContext(t), PullRequest{Image: of + tag})
			if !errors.Is(err, fault.Denied) || !errors.Is(err, ErrSignature) || !strings.Contains(err.Error(), "requires a signature by the key in the policy") {
				t.Errorf("%s: %s: %v", what, tag, err)
			}
		}
		for _, r := range []*registry.Registry{home, mirror} {
			r.Inject(registry.Fault{Path: ".sig", Do: registry.Page(http.StatusInternalServerError)})
		}
		if _, err := n.Pull(testContext(t), PullRequest{Image: of + ":signed"}); !errors.Is(err, fault.Unavailable) || errors.Is(err, ErrSignature) {
			t.Errorf("%s: with a registry that fails: %v", what, err)
		}
		home.Heal()
		mirror.Heal()
		os.Remove(hostsFile)
	}
	n.empty()
	for _, name := range n.entries("run") {
		if strings.HasPrefix(name, hosts.Prefix) {
			t.Errorf("left in the run root: %s", name)
		}
	}
}

// However much is attached to an image, the server holds a few MiB of it, and asks for no
// more than it could keep. The first signatures count.
func TestAttachmentsAreBounded(t *testing.T) {
	useAttachments(t)
	s := newSigstoreSigner(t)
	n := newNode(t)
	n.write("policy.json", `{"default": [`+s.rule("matchRepository")+`]}`)
	a := motd(t, "hostile")
	for what, c := range map[string]struct{ count, size int }{
		"large":                  {trust.MaxSignatures - 1, 4<<20 - 1},
		"as large as one may be": {trust.MaxSignatures - 1, trust.MaxSignatureSize/4*3 - 1<<10},
		"many":                   {5000, 1},
	} {
		r := serve(t, "app", "1", a)
		var list attached
		list.sign(s, r.Addr()+"/app", a.Digest())
		zeros := make([]byte, c.size)
		for range c.count {
			list.add(zeros, nil)
		}
		list.push(t, r, "app", a.Digest())
		var packed bytes.Buffer
		w := gzip.NewWriter(&packed)
		w.Write(zeros)
		w.Close()
		var asked, held atomic.Int64
		before := heap()
		r.Inject(registry.Fault{Path: digest.FromBytes(zeros).Encoded(), Do: func(http.Handler, <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if asked.Add(1) == trust.MaxSignatures-1 {
					held.Store(int64(heap()) - int64(before))
				}
				w.Header().Set("Content-Encoding", "gzip")
				w.Write(packed.Bytes())
			})
		}})
		img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		n.remove(img.ID)
		if n := asked.Load(); n != trust.MaxSignatures-1 {
			t.Errorf("%s: asked for %d attachments, want %d", what, n, trust.MaxSignatures-1)
		}
		if held := held.Load(); held > 64<<20 {
			t.Errorf("%s: %d MiB of memory before the last attachment", what, held>>20)
		}
	}
	n.empty()
}

// An artifact that takes much memory when it is parsed is refused.
func TestCrowdedAttachments(t *testing.T) {
	useAttachments(t)
	n := newNode(t)
	a := motd(t, "crowded")
	r := serve(t, "app", "1", a)
	text := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{},"layers":[%s{}]}`, imagespec.MediaTypeImageManifest, strings.Repeat("{},", 1<<20))
	r.Push("app", attachmentTag(a.Digest()), &image.Artifact{MediaType: imagespec.MediaTypeImageManifest, Manifest: []byte(text)})
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "JSON tokens") {
		t.Errorf("%v", err)
	}
	n.empty()
}
