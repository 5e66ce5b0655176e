package decrypt

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/containers/ocicrypt/utils"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Bounds of the keys of a node.
const (
	maxKeys = 64
	maxKey  = 64 << 10 // bytes
)

// Keys are the private keys of a node.
type Keys struct {
	dir  string
	keys [][]byte
}

// ReadKeys reads all files in a directory and below it. Each is a private key without a
// password, in PEM, DER or as a JWK. The error is fault.Precondition.
func ReadKeys(dir string) (*Keys, error) {
	k := &Keys{dir: dir}
	if dir == "" {
		return nil, fmt.Errorf("set image.decryption_keys_path to the directory with its key: %w", fault.Precondition)
	}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if entry.Type()&fs.ModeSymlink != 0 {
			return fmt.Errorf("%s is a symbolic link, which is not allowed", path)
		}
		if len(k.keys) == maxKeys {
			return fmt.Errorf("more than %d keys", maxKeys)
		}
		key, err := regular.Read(path, maxKey)
		if err != nil {
			return err
		}
		if private, _ := utils.IsPrivateKey(key, nil); !private { // an error may contain a part of the key
			return fmt.Errorf("%s is not a private key without a password in PEM, DER or JWK", path)
		}
		k.keys = append(k.keys, key)
		return nil
	})
	if err == nil && len(k.keys) == 0 {
		err = errors.New("there are none")
	}
	if err != nil {
		return nil, fmt.Errorf("keys in %s (image.decryption_keys_path): %s: %w", dir, err.Error(), fault.Precondition)
	}
	return k, nil
}
