package remote

import (
	"bytes"
	"crypto/elliptic"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"strings"
	"testing"

	"github.com/containers/ocicrypt"
	"github.com/containers/ocicrypt/config"
	"github.com/klauspost/compress/zstd"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/decrypt"
	"github.com/crius-run/crius/test/kit/distribution"
	"github.com/crius-run/crius/test/kit/image"
)

// key makes a key, and returns the paths of its halves.
func (n *node) key(name string, curve elliptic.Curve) (private, public string) {
	n.t.Helper()
	private, public = n.path(name+".key"), n.path(name+".pub")
	key, pub, err := image.NewKey(curve)
	must(n.t, err)
	put(n.t, private, string(key))
	put(n.t, public, string(pub))
	return private, public
}

// In a registry, an encrypted checkpoint is readable for the owners of the keys alone, and for other programs that know
// the format of ocicrypt. Its manifest and signature are for everybody.
func TestEncrypted(t *testing.T) {
	t.Parallel()
	r := distribution.Start(t, nil)
	ref := r.Address + "/pods/web:1"
	n := newNode(t, r.Address)
	dir := n.checkpoint()
	ours, oursPublic := n.key("ours", nil)
	theirs, theirsPublic := n.key("theirs", elliptic.P384())
	other, _ := n.key("other", elliptic.P256())
	var err error
	n.recipients, err = decrypt.ReadRecipients([]string{oursPublic, theirsPublic})
	must(t, err)
	_, err = n.push(t.Context(), nil, ref, dir)
	must(t, err)

	for _, key := range []string{ours, theirs} {
		n.private = key
		if got, err := n.pull(nil, ref, n.keys()); err != nil || !maps.Equal(files(t, got), files(t, dir)) {
			t.Errorf("with %s: %v", key, err)
		}
	}
	for key, want := range map[string]string{"": "the checkpoint is encrypted: set --decrypt", other: "none of the 1 keys in " + other + " (--decrypt) decrypts it", oursPublic: "is not a private key"} {
		n.private = key
		got, err := n.pull(nil, ref, n.keys())
		if err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, fault.Denied) && !errors.Is(err, fault.Precondition) || len(files(t, got)) != 2 {
			t.Errorf("with %q: %v, has %d files", key, err, len(files(t, got)))
		}
	}

	var m imagespec.Manifest
	must(t, json.Unmarshal(get(t, r.Address, "manifests", "1"), &m))
	private, err := config.DecryptWithPrivKeys([][]byte{[]byte(files(t, n.dir)["ours.key"])}, [][]byte{nil})
	must(t, err)
	for i, l := range m.Layers {
		blob := get(t, r.Address, "blobs", l.Digest.String())
		if i < 2 {
			if l.MediaType != documentLayer || len(l.Annotations) != 1 {
				t.Errorf("a document is %+v", l)
			}
			continue
		}
		if !strings.HasSuffix(l.MediaType, "+zstd+encrypted") || bytes.HasPrefix(blob, []byte("\x28\xb5\x2f\xfd")) {
			t.Errorf("layer %d is %s, and its content looks like zstd", i, l.MediaType)
		}
		plain, _, err := ocicrypt.DecryptLayer(private.DecryptConfig, bytes.NewReader(blob), l, false)
		must(t, err)
		z, err := zstd.NewReader(plain)
		must(t, err)
		if n, err := io.Copy(io.Discard, z); err != nil || n == 0 {
			t.Errorf("layer %d by ocicrypt: %d bytes, %v", i, n, err)
		}
		z.Close()
	}
}

// What is no public key is refused before anything is written.
func TestRecipients(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	private, _ := n.key("k", elliptic.P256())
	put(t, n.path("empty"), "")
	for _, path := range []string{private, n.path("empty"), n.path("missing"), n.path("checkpoint.pub"), n.dir} {
		if _, err := decrypt.ReadRecipients([]string{path}); !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
}
