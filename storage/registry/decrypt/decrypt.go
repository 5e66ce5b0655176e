// Package decrypt decrypts layers of images that were encrypted for this node in the format of
// ocicrypt (docs/decisions/0035-decryption.md), and encrypts those of checkpoints.
//
// Each layer is encrypted with a key of its own, which is encrypted with the public keys of its
// readers (JWE). Everything that is read here was chosen by the author of the image.
package decrypt

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"strings"

	"github.com/containers/ocicrypt/config"
	"github.com/containers/ocicrypt/keywrap/jwe"
	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/storage/registry/download"
)

// suffix ends the media types of encrypted layers.
const suffix = "+encrypted"

// Annotations of a layer.
const (
	wrappedAnnotation = "org.opencontainers.image.enc.keys.jwe"
	publicAnnotation  = "org.opencontainers.image.enc.pubopts"
)

// maxWrapped bounds the encrypted forms of a layer's key, one for each reader, in bytes. Each form
// costs a private-key operation.
const maxWrapped = 64 << 10

// cipherType is the only cipher of the format.
const cipherType = "AES_256_CTR_HMAC_SHA256"

// Plain returns the media type of a layer without its encryption.
func Plain(mediaType string) (plain string, encrypted bool) {
	return strings.CutSuffix(mediaType, suffix)
}

// Any reports whether one of the layers is encrypted.
func Any(layers []manifest.LayerInfo) bool {
	for _, l := range layers {
		if _, encrypted := Plain(l.MediaType); encrypted {
			return true
		}
	}
	return false
}

// Layer is an encrypted layer with the secrets that decrypt it.
type Layer struct {
	blob       types.BlobInfo
	key, nonce []byte
	mac        []byte // HMAC of the blob
}

// private is for readers of a layer alone, public for everybody.
type private struct {
	Key     []byte            `json:"symkey"`
	Options map[string][]byte `json:"cipheroptions"`
}

type public struct {
	Cipher  string            `json:"cipher"`
	MAC     []byte            `json:"hmac"`
	Options map[string][]byte `json:"cipheroptions"`
}

// Layer decrypts the key of a layer. The error is fault.Denied if the node has no key for it,
// and fault.Invalid if its annotations are broken.
func (k *Keys) Layer(ctx context.Context, blob types.BlobInfo) (*Layer, error) {
	wrapped, err := base64s(blob.Annotations[wrappedAnnotation])
	if err != nil {
		return nil, invalid("%w", err)
	}
	if len(wrapped) == 0 {
		return nil, invalid("it has no key in the annotation %s, and other kinds of keys are not supported", wrappedAnnotation)
	}
	l := &Layer{blob: blob}
	var known private
	if err := k.unwrap(ctx, wrapped, &known); err != nil {
		return nil, err
	}
	var open public
	text, err := base64.StdEncoding.DecodeString(blob.Annotations[publicAnnotation])
	if err == nil {
		err = json.Unmarshal(text, &open)
	}
	if err != nil {
		return nil, invalid("annotation %s: %w", publicAnnotation, err)
	}
	l.key, l.mac, l.nonce = known.Key, open.MAC, open.Options["nonce"]
	if l.nonce == nil {
		l.nonce = known.Options["nonce"]
	}
	switch {
	case open.Cipher != cipherType:
		return nil, invalid("cipher %.40q is not supported, only %s", open.Cipher, cipherType)
	case len(l.key) != 32 || len(l.nonce) != aes.BlockSize || len(l.mac) != sha256.Size:
		return nil, invalid("its key, nonce or HMAC has the wrong length")
	}
	return l, nil
}

// base64s decodes texts in base64 that are separated by commas.
func base64s(text string) (all [][]byte, err error) {
	if len(text) > maxWrapped {
		return nil, fmt.Errorf("annotation %s has more than %d bytes", wrappedAnnotation, maxWrapped)
	}
	for item := range strings.SplitSeq(text, ",") {
		one, err := base64.StdEncoding.DecodeString(item)
		if err != nil {
			return nil, fmt.Errorf("annotation %s: %w", wrappedAnnotation, err)
		}
		if len(one) > 0 {
			all = append(all, one)
		}
	}
	return all, nil
}

// unwrap decrypts the secrets of a layer from one of their wrapped forms.
func (k *Keys) unwrap(ctx context.Context, wrapped [][]byte, known *private) error {
	parameters := &config.DecryptConfig{Parameters: map[string][][]byte{"privkeys": k.keys, "privkeys-passwords": make([][]byte, len(k.keys))}}
	for _, one := range wrapped {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var text []byte
		err := panics.Do(ctx, "decrypt key of a layer", func() (err error) {
			text, err = jwe.NewKeyWrapper().UnwrapKey(parameters, one)
			return err
		})
		if err != nil { // it is for another reader
			continue
		}
		if err := json.Unmarshal(text, known); err != nil {
			return invalid("what its key decrypts to is broken")
		}
		return nil
	}
	return fmt.Errorf("none of the %d keys in %s decrypts it: %w", len(k.keys), k.from, fault.Denied)
}

// Open decrypts a blob. The reader returns io.EOF only if the blob has its digest and HMAC.
func (l *Layer) Open(blob io.ReadCloser) io.ReadCloser {
	block, err := aes.NewCipher(l.key)
	if err != nil {
		panic(err) // cannot happen, see Layer
	}
	return &reader{
		ReadCloser: blob, of: l, left: l.blob.Size,
		stream: cipher.NewCTR(block, l.nonce), mac: hmac.New(sha256.New, l.key), digester: l.blob.Digest.Algorithm().Digester(),
	}
}

type reader struct {
	io.ReadCloser
	of       *Layer
	left     int64 // bytes
	stream   cipher.Stream
	mac      hash.Hash
	digester digest.Digester
	err      error
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	n, err := r.ReadCloser.Read(p[:min(int64(len(p)), r.left)])
	came := p[:n]
	r.mac.Write(came)
	r.digester.Hash().Write(came)
	r.stream.XORKeyStream(came, came)
	if r.left -= int64(n); r.left > 0 {
		r.err = err
		return n, err
	}
	if r.err = r.verify(); r.err != nil {
		return 0, r.err
	}
	r.err = io.EOF
	return n, nil
}

func (r *reader) verify() error {
	switch got := r.digester.Digest(); {
	case got != r.of.blob.Digest:
		return fmt.Errorf("the registry sent content with another digest, %s: %w", got, download.ErrDiffers)
	case !hmac.Equal(r.mac.Sum(nil), r.of.mac):
		return invalid("encrypted layer %s does not have the HMAC that its annotations say", r.of.blob.Digest)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, fault.Invalid)...)
}
