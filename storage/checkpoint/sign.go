package checkpoint

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Signature is the name of the file with the signature of Manifest. It is written before it.
const Signature = "manifest.sig"

// Files of a node's key pair.
const (
	KeyFile    = "checkpoint.key"
	PublicFile = "checkpoint.pub"
)

const (
	pemPrivate, pemPublic = "PRIVATE KEY", "PUBLIC KEY"

	maxKey = 16 << 10
)

// NodeKey returns the key with which this node signs its checkpoints. It is made when it is first needed:
// checkpoint.key in dir, which only root can read, and checkpoint.pub, which other nodes may trust and which
// always belongs to it. Both are PEM.
func NodeKey(dir string) (ed25519.PrivateKey, error) {
	path := filepath.Join(dir, KeyFile)
	key, err := readPrivate(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeKey(path); err != nil && !errors.Is(err, fs.ErrExist) { // another call has made it meanwhile
			return nil, fmt.Errorf("make the key of this node: %w", err)
		}
		key, err = readPrivate(path)
	}
	if err != nil {
		return nil, err
	}
	if err := showPublic(filepath.Join(dir, PublicFile), key); err != nil {
		return nil, fmt.Errorf("write the public key of this node: %w", err)
	}
	return key, nil
}

func makeKey(path string) error {
	_, made, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	text, err := x509.MarshalPKCS8PrivateKey(made)
	if err != nil {
		return err
	}
	return publish(path, pem.EncodeToMemory(&pem.Block{Type: pemPrivate, Bytes: text}), 0o600, os.Link)
}

// showPublic writes the public key to a file, unless it is there: a crash, or a full disk, may have left none,
// and the key may have been replaced.
func showPublic(path string, key ed25519.PrivateKey) error {
	text, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	text = pem.EncodeToMemory(&pem.Block{Type: pemPublic, Bytes: text})
	if there, err := regular.Read(path, maxKey); err == nil && bytes.Equal(there, text) {
		return nil
	}
	return publish(path, text, 0o644, os.Rename)
}

// publish writes a file that name, which is os.Link or os.Rename, gives its name only when it is whole and on
// the disk. It returns when the name is there, too.
func publish(path string, text []byte, mode os.FileMode, name func(from, to string) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.Write(text)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := name(f.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func readPrivate(path string) (ed25519.PrivateKey, error) {
	f, err := regular.OpenIn(filepath.Dir(path), filepath.Base(path), maxKey)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s can be read or written by others (mode %v): if they may know it, remove it, else give it the mode 0600: %w", path, info.Mode(), fault.Precondition)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKey))
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil || block.Type != pemPrivate {
		return nil, fmt.Errorf("%s is not a PEM private key; remove it, and checkpoints of this node that it has signed are no longer accepted: %w", path, fault.Precondition)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", path, err, fault.Precondition)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s is not an ed25519 key: %w", path, fault.Precondition)
	}
	return key, nil
}

// signed separates these signatures from others of the same key.
const signed = "crius pod checkpoint\x00"

func sign(key ed25519.PrivateKey, manifest []byte) []byte {
	sig := ed25519.Sign(key, append([]byte(signed), manifest...))
	return []byte(base64.StdEncoding.EncodeToString(sig) + "\n")
}

// KeyName returns a short name of a key for logs.
func KeyName(key ed25519.PublicKey) string {
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:8])
}

// Digests returns the files in the directory of a pod's checkpoint, in the order of their paths.
func (t *Target) Digests(ctx context.Context) ([]File, error) {
	var files []File
	root := t.path()
	err := filepath.WalkDir(root+"/.", func(path string, e fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil || e.IsDir() {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		f, err := regular.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		sum := sha256.New()
		if err := copyFile(ctx, sum, f, info.Size()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		files = append(files, File{Path: name, Size: info.Size(), SHA256: hex.EncodeToString(sum.Sum(nil))})
		return nil
	})
	return files, err
}
