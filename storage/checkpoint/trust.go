package checkpoint

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// TrustedKeys returns the keys of which checkpoints are restored: this node's, if it has signed any, and the
// public ones in files.
func TrustedKeys(dir string, files []string) ([]ed25519.PublicKey, error) {
	var keys []ed25519.PublicKey
	own, err := readPrivate(filepath.Join(dir, KeyFile))
	switch {
	case err == nil:
		keys = append(keys, own.Public().(ed25519.PublicKey)) //nolint:forcetypeassert // by its documentation
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	for _, file := range files {
		key, err := readPublic(file)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

func readPublic(path string) (ed25519.PublicKey, error) {
	text, err := regular.Read(path, maxKey)
	if err != nil {
		return nil, fmt.Errorf("runtime.restore_keys: %w: %w", err, fault.Precondition)
	}
	block, _ := pem.Decode(text)
	if block == nil || block.Type != pemPublic {
		return nil, fmt.Errorf("runtime.restore_keys: %s is not a PEM public key: %w", path, fault.Precondition)
	}
	parsed, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("runtime.restore_keys: %s: %w: %w", path, err, fault.Precondition)
	}
	key, ok := parsed.(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("runtime.restore_keys: %s is not an ed25519 key: %w", path, fault.Precondition)
	}
	return key, nil
}

// verify returns the hexadecimal name of the key that has signed a manifest.
func verify(keys []ed25519.PublicKey, manifest, signature []byte) (name string, err error) {
	sig, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(signature)))
	if err != nil {
		return "", fmt.Errorf("%s is not base64: %w", Signature, fault.Denied)
	}
	for _, key := range keys {
		if ed25519.Verify(key, append([]byte(signed), manifest...), sig) {
			return KeyName(key), nil
		}
	}
	return "", fmt.Errorf("%s was not signed by this node or by a key of runtime.restore_keys, or has been changed: %w", Manifest, fault.Denied)
}
