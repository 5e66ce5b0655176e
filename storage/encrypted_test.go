package storage

import (
	"crypto/elliptic"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

// keyPair puts a private key into a file, and returns the public one.
func keyPair(t *testing.T, file string, curve elliptic.Curve) []byte {
	t.Helper()
	private, public, err := image.NewKey(curve)
	ok(t, err)
	ok(t, os.MkdirAll(filepath.Dir(file), 0o700))
	ok(t, os.WriteFile(file, private, 0o600))
	return public
}

func encrypt(t *testing.T, a *image.Artifact, publicKey []byte) *image.Artifact {
	t.Helper()
	encrypted, err := a.Encrypt(publicKey)
	ok(t, err)
	return encrypted
}

// change is the image with another layer description.
func change(t *testing.T, a *image.Artifact, of func(*imagespec.Descriptor)) *image.Artifact {
	t.Helper()
	changed := *a
	ok(t, changed.Change(func(m *imagespec.Manifest) error {
		of(&m.Layers[1])
		return nil
	}))
	return &changed
}

func layersOf(t *testing.T, a *image.Artifact) (digests []digest.Digest) {
	t.Helper()
	same := *a
	ok(t, same.Change(func(m *imagespec.Manifest) error {
		for _, l := range m.Layers {
			digests = append(digests, l.Digest)
		}
		return nil
	}))
	return digests
}

// An encrypted image is pulled, by the node that has its key, under the registry's digests,
// and is then one like others.
func TestEncryptedImage(t *testing.T) {
	t.Parallel()
	for name, curve := range map[string]elliptic.Curve{"RSA": nil, "EC": elliptic.P256()} {
		keys := filepath.Join(t.TempDir(), "keys")
		n := newNode(t, synced, func(c *Options) { c.DecryptionKeysPath = keys })
		plain := motd(t, "secret of "+name)
		encrypted := encrypt(t, plain, keyPair(t, filepath.Join(keys, "team/a.pem"), curve))
		keyPair(t, filepath.Join(keys, "other.pem"), nil)
		r := serve(t, "app", "1", encrypted)
		img := n.pull(r.Addr() + "/app:1")
		if want := r.Addr() + "/app@" + encrypted.Digest().String(); img.ID != plain.ID() || !slices.Equal(img.RepoDigests, []string{want}) {
			t.Errorf("%s: pulled %+v", name, img)
		}
		root := n.rootfs("c", img.ID)
		n.mount(root)
		if got := n.read(root, "etc/motd"); got != "secret of "+name {
			t.Errorf("%s: the container reads %q", name, got)
		}
		n.removeRootfs(root)
		r.Forget()
		if again := n.pull(r.Addr() + "/app@" + encrypted.Digest().String()); again.ID != img.ID || len(blobRequests(r)) > 0 {
			t.Errorf("%s: pulled again %+v, fetched %q", name, again, blobRequests(r))
		}
		r.Push("app", "plain", plain)
		if same := n.pull(r.Addr() + "/app:plain"); same.ID != img.ID || len(n.list()) != 1 {
			t.Errorf("%s: pulled unencrypted %+v", name, same)
		}
		n.cutPower(true, func() {})
		if list := n.list(); len(list) != 1 || list[0].ID != img.ID {
			t.Errorf("%s: after a power cut: %+v", name, list)
		}
		n.remove(img.ID)
		n.empty()
	}
}

// Without its key nothing of an encrypted image is fetched, even if the image is here.
func TestEncryptedImageWithoutKey(t *testing.T) {
	t.Parallel()
	keys := filepath.Join(t.TempDir(), "keys")
	right := filepath.Join(keys, "right.pem")
	plain := motd(t, "secret")
	r := serve(t, "app", "1", encrypt(t, plain, keyPair(t, right, nil)))
	n := newNode(t, func(c *Options) { c.DecryptionKeysPath = keys })
	refused := func(what string, kind error, words string) {
		t.Helper()
		r.Forget()
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		fetched := slices.DeleteFunc(blobRequests(r), func(blob string) bool { return blob == digest.Digest("sha256:"+plain.ID()).String() })
		if !errors.Is(err, kind) || !strings.Contains(err.Error(), words) || len(fetched) > 0 {
			t.Errorf("%s: %v, fetched %q", what, err, fetched)
		}
	}
	key, err := os.ReadFile(right)
	ok(t, err)
	n.pull(r.Addr() + "/app:1")
	ok(t, os.Remove(right))
	refused("no key", fault.Precondition, "image.decryption_keys_path")
	keyPair(t, filepath.Join(keys, "wrong.pem"), nil)
	refused("the wrong key", fault.Denied, "image.decryption_keys_path")
	n.remove(plain.ID())
	refused("an image that is not here", fault.Denied, "image.decryption_keys_path")
	ok(t, os.WriteFile(right, []byte("junk"), 0o600))
	refused("a broken key", fault.Precondition, right)
	ok(t, os.WriteFile(right, make([]byte, 1<<20), 0o600))
	refused("a large key", fault.Precondition, right)
	ok(t, os.Remove(right))
	ok(t, os.Symlink(filepath.Join(keys, "wrong.pem"), right))
	refused("a link", fault.Precondition, right)
	ok(t, os.Remove(right))
	ok(t, os.WriteFile(right, key, 0o600))
	n.pull(r.Addr() + "/app:1")
	n.remove(plain.ID())
	n.cfg.DecryptionKeysPath = ""
	n.restart()
	refused("no directory", fault.Precondition, "image.decryption_keys_path")
	n.empty()
}

// Everybody who has the public key of a node can encrypt for it, but can neither make it fail nor
// make it take anything else for a layer.
func TestHostileEncryptedImage(t *testing.T) {
	t.Parallel()
	keys := filepath.Join(t.TempDir(), "keys")
	public := keyPair(t, filepath.Join(keys, "key.pem"), elliptic.P256())
	n := newNode(t, func(c *Options) { c.DecryptionKeysPath = keys })
	good := encrypt(t, motd(t, "good"), public)
	other := encrypt(t, motd(t, "other"), public)
	const annotation = "org.opencontainers.image.enc.pubopts"
	options := func(name string, value any) func(*imagespec.Descriptor) {
		return func(l *imagespec.Descriptor) {
			text, err := base64.StdEncoding.DecodeString(l.Annotations[annotation])
			ok(t, err)
			var all map[string]any
			ok(t, json.Unmarshal(text, &all))
			all[name] = value
			text, err = json.Marshal(all)
			ok(t, err)
			l.Annotations[annotation] = base64.StdEncoding.EncodeToString(text)
		}
	}
	wrapped := func(text string) func(*imagespec.Descriptor) {
		return func(l *imagespec.Descriptor) { l.Annotations["org.opencontainers.image.enc.keys.jwe"] = text }
	}
	var layer imagespec.Descriptor
	change(t, other, func(l *imagespec.Descriptor) { layer = *l })
	swapped := change(t, good, func(l *imagespec.Descriptor) { *l = layer })
	swapped.Blobs = other.Blobs
	swapped.Blobs[swapped.Config] = good.Blobs[swapped.Config]
	for blob, content := range good.Blobs {
		swapped.Blobs[blob] = content
	}
	r := serve(t, "app", "good", good)
	for tag, a := range map[string]*image.Artifact{
		"hmac":    change(t, good, options("hmac", make([]byte, 32))),
		"short":   change(t, good, options("hmac", make([]byte, 1))),
		"nonce":   change(t, good, options("cipheroptions", map[string][]byte{"nonce": make([]byte, 5)})),
		"cipher":  change(t, good, options("cipher", "ROT13")),
		"pubopts": change(t, good, func(l *imagespec.Descriptor) { l.Annotations[annotation] = "!" }),
		"base64":  change(t, good, wrapped("!")),
		"none":    change(t, good, wrapped("")),
		"long":    change(t, good, wrapped(strings.Repeat("AAAA,", 1<<15))),
		"format":  change(t, good, func(l *imagespec.Descriptor) { l.MediaType = "application/unknown+encrypted" }),
		"denied":  change(t, good, wrapped("AAAA")),
		"swapped": swapped,
	} {
		r.Push("app", tag, a)
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:" + tag})
		kind := fault.Invalid
		switch tag {
		case "denied":
			kind = fault.Denied
		case "swapped":
			kind = nil
		}
		if err == nil || kind != nil && !errors.Is(err, kind) || len(n.list()) > 0 {
			t.Errorf("%s: %v, images %v", tag, err, n.list())
		}
	}
	r.Inject(registry.Fault{Path: "/blobs/" + layersOf(t, good)[1].String(), Do: registry.Replace(func(blob []byte) []byte {
		blob[0] ^= 1
		return blob
	})})
	if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:good"}); err == nil || !strings.Contains(err.Error(), "digest") {
		t.Errorf("a registry that sends another layer: %v", err)
	}
	r.Heal()
	n.empty()
	if img := n.pull(r.Addr() + "/app:good"); img.ID != good.ID() {
		t.Errorf("pulled %+v", img)
	}
}
