package decrypt

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/containers/ocicrypt/config"
	"github.com/containers/ocicrypt/keywrap/jwe"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Recipients are those for whom layers are encrypted: the owners of public keys.
type Recipients struct{ keys [][]byte }

// ReadRecipients reads public keys, in PEM, DER or as JWKs. The error is fault.Invalid.
func ReadRecipients(paths []string) (*Recipients, error) {
	r := &Recipients{}
	for _, path := range paths {
		key, err := regular.Read(path, maxKey)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", err, fault.Invalid)
		}
		if _, err := (&Recipients{[][]byte{key}}).wrap(nil); err != nil {
			return nil, fmt.Errorf("%s is not a public key (RSA or EC) in PEM, DER or JWK: %w", path, fault.Invalid)
		}
		r.keys = append(r.keys, key)
	}
	return r, nil
}

// wrap encrypts the secrets of a layer.
func (r *Recipients) wrap(secrets []byte) ([]byte, error) {
	return jwe.NewKeyWrapper().WrapKeys(&config.EncryptConfig{Parameters: map[string][][]byte{"pubkeys": r.keys}}, secrets)
}

// EncryptedType returns the media type of a layer once it is encrypted.
func EncryptedType(plain string) string { return plain + suffix }

// Encrypt encrypts a layer, with a key of its own.
func (r *Recipients) Encrypt(layer io.Reader) *Encrypted {
	key, nonce := make([]byte, sha256.Size), make([]byte, aes.BlockSize)
	_, _ = rand.Read(key) // never fails
	_, _ = rand.Read(nonce)
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // cannot happen: the key has the right length
	}
	return &Encrypted{
		to: r, layer: layer, stream: cipher.NewCTR(block, nonce), mac: hmac.New(sha256.New, key),
		secrets: private{Key: key, Options: map[string][]byte{"nonce": nonce}},
	}
}

// Encrypted is a layer that is being encrypted.
type Encrypted struct {
	to      *Recipients
	layer   io.Reader
	stream  cipher.Stream
	mac     hash.Hash
	secrets private
	whole   bool
}

// Read implements io.Reader.
func (e *Encrypted) Read(p []byte) (int, error) {
	n, err := e.layer.Read(p)
	e.stream.XORKeyStream(p[:n], p[:n])
	e.mac.Write(p[:n])
	e.whole = errors.Is(err, io.EOF)
	return n, err
}

// Annotations returns those of the layer, once it has been read to its end.
func (e *Encrypted) Annotations() (map[string]string, error) {
	if !e.whole {
		return nil, errors.New("the layer has not been read to its end")
	}
	secrets, err := json.Marshal(e.secrets)
	if err != nil {
		return nil, err
	}
	wrapped, err := e.to.wrap(secrets)
	if err != nil {
		return nil, err
	}
	open, err := json.Marshal(public{Cipher: cipherType, MAC: e.mac.Sum(nil), Options: map[string][]byte{}})
	if err != nil {
		return nil, err
	}
	return map[string]string{
		wrappedAnnotation: base64.StdEncoding.EncodeToString(wrapped),
		publicAnnotation:  base64.StdEncoding.EncodeToString(open),
	}, nil
}
