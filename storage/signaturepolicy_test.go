package storage

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
)

// Signatures of either kind decide about an image and about the one that an index
// leads to, whatever stands between the registry and the copy.
func TestSignedImages(t *testing.T) {
	t.Parallel()
	for _, s := range []signer{newSigstoreSigner(t), newGPGSigner(t)} {
		n := newNode(t)
		n.write("policy.json", `{"default": [`+s.rule("matchExact")+`]}`)
		repo := testRepo()
		signed, unsigned := motd(t, "signed"), motd(t, "unsigned")
		r := serve(t, repo, "signed", signed)
		r.Push(repo, "unsigned", unsigned)
		r.Push(repo, "index", index(t, signed))
		r.Push(repo, "unsigned-index", index(t, unsigned))
		for i, tag := range []string{"signed", "index"} {
			lookaside(t, repo, signed.Digest(), i+1, s.sign(r.Addr()+"/"+repo+":"+tag, signed.Digest()))
		}
		for _, tag := range []string{"signed", "index"} {
			n.remove(n.pull(r.Addr() + "/" + repo + ":" + tag).ID)
		}
		for _, tag := range []string{"unsigned", "unsigned-index"} {
			r.Forget()
			name := r.Addr() + "/" + repo + ":" + tag
			_, err := n.Pull(testContext(t), PullRequest{Image: name})
			if !errors.Is(err, fault.Denied) || !errors.Is(err, ErrSignature) {
				t.Errorf("%s: %v", tag, err)
			}
			want := "policy.json: rule default[0] (" + s.kind() + ") requires a signature by the key in the policy for " + name
			if err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%s: refused with %q, want %q in it", tag, err, want)
			}
			for _, request := range r.Requests() {
				if strings.Contains(request.Path, "/blobs/") {
					t.Errorf("%s: asked for %s before the policy had decided", tag, request.Path)
				}
			}
		}
		n.empty()
	}
}

// testRepo is a name that nobody else has: root's signatures lie below one directory.
func testRepo() string { return "crius-test-" + digest.FromBytes(random(16)).Encoded()[:16] }

// signer signs manifests for names.
type signer interface {
	kind() string
	rule(identity string) string // of a policy
	sign(name string, manifest digest.Digest) []byte
}

type sigstoreSigner struct {
	t   testing.TB
	key *ecdsa.PrivateKey
}

func newSigstoreSigner(t testing.TB) *sigstoreSigner {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &sigstoreSigner{t, key}
}

func (s *sigstoreSigner) kind() string { return "sigstoreSigned" }

// public is the public key as a file.
func (s *sigstoreSigner) public() []byte {
	s.t.Helper()
	der, err := x509.MarshalPKIXPublicKey(&s.key.PublicKey)
	if err != nil {
		s.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func (s *sigstoreSigner) rule(identity string) string {
	return fmt.Sprintf(`{"type": "sigstoreSigned", "keyData": %q, "signedIdentity": {"type": %q}}`,
		base64.StdEncoding.EncodeToString(s.public()), identity)
}

func (s *sigstoreSigner) sign(name string, manifest digest.Digest) []byte {
	s.t.Helper()
	payload := statement("cosign container image signature", name, manifest)
	sum := sha256.Sum256(payload)
	signature, err := ecdsa.SignASN1(rand.Reader, s.key, sum[:])
	if err != nil {
		s.t.Fatal(err)
	}
	blob, err := json.Marshal(map[string]any{
		"mimeType":    "application/vnd.dev.cosign.simplesigning.v1+json",
		"payload":     payload,
		"annotations": map[string]string{"dev.cosignproject.cosign/signature": base64.StdEncoding.EncodeToString(signature)},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return append([]byte("\x00sigstore-json\n"), blob...)
}

func statement(kind, name string, manifest digest.Digest) []byte {
	return fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":%q},"image":{"docker-manifest-digest":%q},"type":%q},"optional":{}}`,
		name, manifest, kind)
}

type gpgSigner struct {
	t      testing.TB
	entity *openpgp.Entity
}

func newGPGSigner(t testing.TB) *gpgSigner {
	t.Helper()
	entity, err := openpgp.NewEntity("signer", "", "signer@example.org", &packet.Config{DefaultHash: crypto.SHA256})
	if err != nil {
		t.Fatal(err)
	}
	return &gpgSigner{t, entity}
}

func (s *gpgSigner) kind() string { return "signedBy" }

func (s *gpgSigner) rule(identity string) string {
	s.t.Helper()
	var public bytes.Buffer
	if err := s.entity.Serialize(&public); err != nil {
		s.t.Fatal(err)
	}
	return fmt.Sprintf(`{"type": "signedBy", "keyType": "GPGKeys", "keyData": %q, "signedIdentity": {"type": %q}}`,
		base64.StdEncoding.EncodeToString(public.Bytes()), identity)
}

func (s *gpgSigner) sign(name string, manifest digest.Digest) []byte {
	s.t.Helper()
	var message bytes.Buffer
	w, err := openpgp.Sign(&message, s.entity, nil, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := w.Write(statement("atomic container signature", name, manifest)); err != nil {
		s.t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		s.t.Fatal(err)
	}
	return message.Bytes()
}

// lookaside stores an image's i-th signature where the library looks for it when no
// registry has it.
func lookaside(t testing.TB, repo string, manifest digest.Digest, i int, signature []byte) {
	t.Helper()
	dir := filepath.Join("/var/lib/containers/sigstore", fmt.Sprintf("%s@%s=%s", repo, manifest.Algorithm(), manifest.Encoded()))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		os.RemoveAll(dir)
		os.Remove(filepath.Dir(dir)) // unless it holds others
	})
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("signature-%d", i)), signature, 0o600); err != nil {
		t.Fatal(err)
	}
}
