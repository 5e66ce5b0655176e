package storage

import (
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

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
)

// Sigstore signatures decide about an image and about the one that an index leads
// to, whatever stands between the registry and the copy.
func TestSigstorePolicy(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	n.write("policy.json", sigstorePolicy(t, &key.PublicKey))

	// A name that nobody else has: root's signatures lie below one directory.
	repo := "crius-test-" + digest.FromBytes(random(16)).Encoded()[:16]
	signed, unsigned := motd(t, "signed"), motd(t, "unsigned")
	r := serve(t, repo, "signed", signed)
	r.Push(repo, "unsigned", unsigned)
	r.Push(repo, "index", index(t, signed))
	r.Push(repo, "unsigned-index", index(t, unsigned))
	for _, tag := range []string{"signed", "index"} {
		sign(t, key, repo, r.Addr()+"/"+repo+":"+tag, signed.Digest())
		n.remove(n.pull(r.Addr() + "/" + repo + ":" + tag).ID)
	}
	for _, tag := range []string{"unsigned", "unsigned-index"} {
		r.Forget()
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/" + repo + ":" + tag})
		if !errors.Is(err, fault.Denied) || !errors.Is(err, ErrSignature) {
			t.Errorf("%s: %v", tag, err)
		}
		for _, request := range r.Requests() {
			if strings.Contains(request.Path, "/blobs/") {
				t.Errorf("%s: asked for %s before the policy had decided", tag, request.Path)
			}
		}
	}
	n.empty()
}

func sigstorePolicy(t *testing.T, key *ecdsa.PublicKey) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`{"default": [{"type": "sigstoreSigned", "keyData": %q, "signedIdentity": {"type": "matchExact"}}]}`,
		base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})))
}

// sign stores a signature where the library looks for it when no registry has it.
func sign(t *testing.T, key *ecdsa.PrivateKey, repo, name string, manifest digest.Digest) {
	t.Helper()
	payload := fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":%q},"image":{"docker-manifest-digest":%q},`+
		`"type":"cosign container image signature"},"optional":{}}`, name, manifest)
	sum := sha256.Sum256(payload)
	signature, err := ecdsa.SignASN1(rand.Reader, key, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	blob, err := json.Marshal(map[string]any{
		"mimeType":    "application/vnd.dev.cosign.simplesigning.v1+json",
		"payload":     payload,
		"annotations": map[string]string{"dev.cosignproject.cosign/signature": base64.StdEncoding.EncodeToString(signature)},
	})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join("/var/lib/containers/sigstore", fmt.Sprintf("%s@%s=%s", repo, manifest.Algorithm(), manifest.Encoded()))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		os.RemoveAll(dir)
		os.Remove(filepath.Dir(dir)) // unless it holds others
	})
	if err := os.WriteFile(filepath.Join(dir, "signature-1"), append([]byte("\x00sigstore-json\n"), blob...), 0o600); err != nil {
		t.Fatal(err)
	}
}
