package trust

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

const acceptAll = `{"default": [{"type": "insecureAcceptAnything"}]}`

func dockerReference(t *testing.T, name string) types.ImageReference {
	t.Helper()
	ref, err := docker.ParseReference("//" + name)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

// unsigned is an image without signatures.
type unsigned struct{ ref types.ImageReference }

func (u unsigned) Reference() types.ImageReference { return u.ref }
func (u unsigned) Manifest(context.Context) ([]byte, string, error) {
	return []byte("{}"), "", nil
}
func (u unsigned) Signatures(context.Context) ([][]byte, error) { return nil, nil }

func TestRefusalNamesRuleAndIdentity(t *testing.T) {
	t.Parallel()
	digested := "example.org/a/b@sha256:" + strings.Repeat("0", 64)
	signed := func(scope, rule string) string {
		return `{"default": [{"type": "reject"}], "transports": {"docker": {"` + scope + `": [` + rule + `]}}}`
	}
	const key = `{"type": "sigstoreSigned", "keyPath": "/keys/a.pub"`
	for _, c := range []struct{ policy, name, want string }{
		{signed("example.com", key+"}"), "example.org/a/b:1", "rule default[0] rejects example.org/a/b: "},
		{signed("example.org", key+"}"), "example.org/a/b:1", `rule transports.docker["example.org"][0] (sigstoreSigned) requires a signature by the key in /keys/a.pub for example.org/a/b:1: A signature was required`},
		{signed("example.org/a", key+"}"), digested, `docker["example.org/a"][0] (sigstoreSigned) requires a signature by the key in /keys/a.pub for repository example.org/a/b: `},
		{signed("", key+`, "signedIdentity": {"type": "matchRepository"}}`), "example.org/a/b:1", `docker[""][0] (sigstoreSigned) requires a signature by the key in /keys/a.pub for repository example.org/a/b: `},
		{signed("example.org/a/b:1", `{"type": "insecureAcceptAnything"}, `+key+`, "signedIdentity": {"type": "exactReference", "dockerReference": "example.net/c:2"}}`), "example.org/a/b:1", `docker["example.org/a/b:1"][1] (sigstoreSigned) requires a signature by the key in /keys/a.pub for example.net/c:2: `},
		{signed("*.org", key+`, "signedIdentity": {"type": "exactRepository", "dockerRepository": "example.net/c"}}`), "example.org/a/b:1", `for repository example.net/c: `},
		{signed("example.org", key+`, "signedIdentity": {"type": "remapIdentity", "prefix": "example.org", "signedPrefix": "example.net"}}`), "example.org/a/b:1", `for example.org/a/b:1, with example.net in place of example.org: `},
		{signed("example.org", `{"type": "signedBy", "keyType": "GPGKeys", "keyPaths": ["/a", "/b"]}`), "example.org/a/b:1", `(signedBy) requires a signature by a key in /a, /b for example.org/a/b:1: `},
		{signed("example.org", `{"type": "sigstoreSigned", "fulcio": {"caPath": "/ca", "oidcIssuer": "https://issuer", "subjectEmail": "a@b"}, "rekorPublicKeyPath": "/rekor"}`), "example.org/a/b:1", `requires a signature by a@b (issuer https://issuer) for example.org/a/b:1: `},
	} {
		p := &Policies{parsed: map[string]*Policy{}}
		policy, err := p.parse("/etc/policy.json", []byte(c.policy))
		if err != nil {
			t.Errorf("%s: %v", c.policy, err)
			continue
		}
		err = policy.Check(t.Context(), unsigned{dockerReference(t, c.name)})
		if !errors.Is(err, ErrSignature) || !errors.Is(err, fault.Denied) || !strings.Contains(err.Error(), c.want) ||
			!strings.HasPrefix(err.Error(), "image refused by the signature policy /etc/policy.json: rule ") {
			t.Errorf("%s: %q, want %q in it", c.policy, err, c.want)
		}
	}
}

func TestCheckName(t *testing.T) {
	t.Parallel()
	p := &Policies{parsed: map[string]*Policy{}}
	policy, err := p.parse("/etc/policy.json", []byte(`{"default": [{"type": "reject"}], "transports": {"docker": {
		"example.org": [{"type": "insecureAcceptAnything"}],
		"example.net": [{"type": "insecureAcceptAnything"}, {"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/a"}],
		"example.com": [{"type": "sigstoreSigned", "keyPath": "/b"}]}}}`))
	if err != nil || policy.AcceptsAll {
		t.Fatal(policy, err)
	}
	for name, want := range map[string]struct{ decided, accepted bool }{
		"example.org/a:1": {true, true},
		"example.edu/a:1": {true, false},
		"example.net/a:1": {false, true},
		"example.com/a:1": {false, true},
	} {
		decided, err := policy.CheckName(t.Context(), dockerReference(t, name))
		if decided != want.decided || (err == nil) != want.accepted {
			t.Errorf("%s: %t, %v", name, decided, err)
		}
	}
	if want := []string{"/a", "/b"}; !slices.Equal(policy.keyFiles, want) {
		t.Errorf("files %q, want %q", policy.keyFiles, want)
	}
}

func TestAcceptsAll(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		acceptAll: true,
		`{"default": [{"type": "insecureAcceptAnything"}], "transports": {"dir": {"": [{"type": "reject"}]}}}`:               true,
		`{"default": [{"type": "insecureAcceptAnything"}], "transports": {"docker": {"example.org": [{"type": "reject"}]}}}`: false,
		`{"default": [{"type": "insecureAcceptAnything"}, {"type": "reject"}]}`:                                              false,
		`{"default": [{"type": "reject"}], "transports": {"docker": {"": [{"type": "insecureAcceptAnything"}]}}}`:            false,
		`{"default": [{"type": "sigstoreSigned", "keyPath": "/a"}]}`:                                                         false,
	} {
		policy, err := NewPolicies("", "").parse("p", []byte(text))
		if err != nil || policy.AcceptsAll != want {
			t.Errorf("%s: %+v, %v", text, policy, err)
		}
	}
}

func TestPolicyFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "policy.json")
	p := NewPolicies(file, dir)
	if _, err := p.For(""); !errors.Is(err, ErrSignature) || !errors.Is(err, fault.Precondition) || !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), file) {
		t.Errorf("without a policy: %v", err)
	}
	write := func(name, content string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("policy.json", acceptAll)
	write("large.json", acceptAll+strings.Repeat(" ", maxFile))
	if err := os.Mkdir(filepath.Join(dir, "dir.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, namespace := range []string{"large", "dir"} { // not for the node's policy instead
		if _, err := p.For(namespace); !errors.Is(err, ErrSignature) || !errors.Is(err, fault.Precondition) {
			t.Errorf("namespace %s: %v", namespace, err)
		}
	}
	first, err := p.For("other")
	if err != nil || !first.AcceptsAll || first.Path != file {
		t.Fatal(first, err)
	}
	if again, err := p.For("../policy"); err != nil || again != first {
		t.Errorf("read again: %v, %v", again, err)
	}
	write("policy.json", `{"default": [{"type": "reject"}]}`)
	if changed, err := p.For("other"); err != nil || changed.AcceptsAll {
		t.Errorf("after a change: %v, %v", changed, err)
	}
}

func TestAnswersAreBounded(t *testing.T) {
	t.Parallel()
	p := NewPolicies("", "")
	for i := range 2*maxAccepted + 2 {
		p.Accept(Answer{byte(i), byte(i >> 8)})
	}
	if len(p.accepted) > maxAccepted || !p.Accepted(Answer{1, byte(2 * maxAccepted >> 8)}) || p.Accepted(Answer{1, 1}) {
		t.Errorf("%d answers", len(p.accepted))
	}
	p.accepted[Answer{7}] = p.accepted[Answer{7}].Add(-keepAnswer)
	if p.Accepted(Answer{7}) {
		t.Error("an answer is too old")
	}
}

type simple []byte

func (s simple) UntrustedSignature() []byte { return s }

func TestBlobs(t *testing.T) {
	t.Parallel()
	blobs, dropped := Blobs([]any{simple("a"), 1, simple("b")})
	if len(blobs) != 2 || string(blobs[0]) != "\x00simple-signing\na" || dropped != 1 {
		t.Errorf("%q, %d", blobs, dropped)
	}
	blobs, dropped = Blobs([]simple{make([]byte, MaxSignatureSize/2), make([]byte, MaxSignatureSize), simple("c")})
	if len(blobs) != 2 || dropped != 1 {
		t.Errorf("%d signatures, %d left out", len(blobs), dropped)
	}
	if blobs, dropped = Blobs(make([]simple, MaxSignatures+3)); len(blobs) != MaxSignatures || dropped != 3 {
		t.Errorf("%d signatures, %d left out", len(blobs), dropped)
	}
}

func TestUnion(t *testing.T) {
	t.Parallel()
	a, b, large := []byte("a"), []byte("b"), make([]byte, MaxSignatureSize)
	got := Union([][]byte{a}, [][]byte{a, large, b})
	if !slices.EqualFunc(got, [][]byte{a, b}, slices.Equal) {
		t.Errorf("%q", got)
	}
	many := make([][]byte, 2*MaxSignatures)
	for i := range many {
		many[i] = []byte{byte(i), byte(i >> 8)}
	}
	if got := Union(nil, many); len(got) != MaxSignatures {
		t.Errorf("%d signatures", len(got))
	}
}

func TestLocations(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, content := range map[string]string{
		"a.yaml": "default-docker:\n  use-sigstore-attachments: true\n  lookaside: https://default.example\n",
		"b.yaml": "docker:\n  example.org:\n    use-sigstore-attachments: false\n    sigstore: https://old.example\n" +
			"  example.org:5000: {lookaside: 'https://port.example'}\n  example.org/a: {use-sigstore-attachments: true}\n",
		"c.yaml": "docker:\n  example.org/a/b: {lookaside: 'https://ab.example/x?y=z'}\n  example.org/a/b:1: {use-sigstore-attachments: false}\n",
		"d.conf": "nonsense",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	without := filepath.Join(t.TempDir(), "registries.d")
	for i, c := range []struct {
		image string
		want  bool
	}{
		{"example.net/a:1", true},
		{"example.org/x:1", false},
		{"example.org:5000/x:1", true},
		{"example.org/a:1", true},
		{"example.org/a/b:2", true},
		{"example.org/a/b:1", false},
		{"example.org/a/b@sha256:" + strings.Repeat("0", 64), true},
	} {
		ref := dockerReference(t, c.image)
		l, err := ReadLocations(&types.SystemContext{RegistriesDirPath: dir}, ref)
		if err != nil {
			t.Fatal(err)
		}
		if got := l.Attachments(ref.DockerReference()); got != c.want {
			t.Errorf("%s: attachments %t", c.image, got)
		}
		if i == 0 {
			if err := l.WriteWithoutAttachments(without); err != nil {
				t.Fatal(err)
			}
		}
		copied, err := ReadLocations(&types.SystemContext{RegistriesDirPath: without}, ref)
		if err != nil || copied.Attachments(ref.DockerReference()) {
			t.Errorf("%s: attachments in the copy: %+v, %v", c.image, copied, err)
		}
		want, err := docker.SignatureStorageBaseURL(&types.SystemContext{RegistriesDirPath: dir}, ref, false)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := docker.SignatureStorageBaseURL(&types.SystemContext{RegistriesDirPath: without}, ref, false); err != nil || got.String() != want.String() {
			t.Errorf("%s: lookaside %s in the copy, %v, want %s", c.image, got, err, want)
		}
	}
	for name, content := range map[string]string{"e.yaml": "docker: {example.org: {}}\n", "f.yaml": "docker: [\n"} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ReadLocations(&types.SystemContext{RegistriesDirPath: dir}, dockerReference(t, "example.org/a:1"))
		if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v", name, err)
		}
		os.Remove(file)
	}
}
