package image

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"

	"github.com/containers/ocicrypt"
	"github.com/containers/ocicrypt/config"
	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
)

// NewKey returns a new key in PEM, for an elliptic curve, or RSA without one.
func NewKey(curve elliptic.Curve) (private, public []byte, err error) {
	var key crypto.Signer
	if curve != nil {
		key, err = ecdsa.GenerateKey(curve, rand.Reader)
	} else {
		key, err = rsa.GenerateKey(rand.Reader, 2048)
	}
	if err == nil {
		private, err = x509.MarshalPKCS8PrivateKey(key)
	}
	if err == nil {
		public, err = x509.MarshalPKIXPublicKey(key.Public())
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), err
}

// Encrypt returns the image with layers that the owner of a public key (PEM)
// can decrypt, like skopeo's.
func (a *Artifact) Encrypt(publicKey []byte) (*Artifact, error) {
	keys, err := config.EncryptWithJwe([][]byte{publicKey})
	if err != nil {
		return nil, fmt.Errorf("read public key: %w", err)
	}
	encrypted := *a
	encrypted.Blobs = map[digest.Digest][]byte{a.Config: a.Blobs[a.Config]}
	err = encrypted.Change(func(m *imagespec.Manifest) error {
		for i := range m.Layers {
			l := &m.Layers[i]
			stream, end, err := ocicrypt.EncryptLayer(keys.EncryptConfig, bytes.NewReader(a.Blobs[l.Digest]), *l)
			if err != nil {
				return fmt.Errorf("encrypt layer: %w", err)
			}
			blob, err := io.ReadAll(stream)
			if err != nil {
				return fmt.Errorf("encrypt layer: %w", err)
			}
			annotations, err := end()
			if err != nil {
				return fmt.Errorf("encrypt key of layer: %w", err)
			}
			if l.Annotations == nil {
				l.Annotations = map[string]string{}
			}
			maps.Copy(l.Annotations, annotations)
			l.MediaType += "+encrypted"
			l.Digest, l.Size = digest.FromBytes(blob), int64(len(blob))
			encrypted.Blobs[l.Digest] = blob
		}
		return nil
	})
	return &encrypted, err
}

// Change returns a with a changed manifest.
func (a *Artifact) Change(change func(*imagespec.Manifest) error) error {
	var m imagespec.Manifest
	err := json.Unmarshal(a.Manifest, &m)
	if err == nil {
		err = change(&m)
	}
	if err == nil {
		a.Manifest, err = json.Marshal(m)
	}
	return err
}
