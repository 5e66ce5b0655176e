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
	from string // for messages
	keys [][]byte
}

// Option is the option that names the directory with the keys of a node.
const Option = "image.decryption_keys_path"

// ReadKeys reads a file, or all files in a directory and below it, which an option names. Each is a
// private key without a password, in PEM, DER or as a JWK. The error is fault.Precondition.
func ReadKeys(path, option string) (*Keys, error) {
	k := &Keys{from: fmt.Sprintf("%s (%s)", path, option)}
	if path == "" {
		return nil, fmt.Errorf("set %s to the directory with its key: %w", option, fault.Precondition)
	}
	err := filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
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
		return nil, fmt.Errorf("keys in %s: %s: %w", k.from, err.Error(), fault.Precondition)
	}
	return k, nil
}
