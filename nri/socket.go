package nri

import (
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"os"
	"path/filepath"
)

// MaxSocketDir is the maximum length of the path of the socket's directory: the
// library first listens in a directory beside the socket, and a socket's path
// has 107 bytes.
const MaxSocketDir = 107 - len("/.abcde/s")

// hiddenSocket returns where the library first listens: it leaves the mode of
// its socket to the umask, and the directory of the socket may be open to all
// users. The path is as long as with the default name, nri.sock, whatever the
// socket's name is.
func hiddenSocket(socket string) string {
	sum := sha256.Sum256([]byte(filepath.Base(socket)))
	name := base32.HexEncoding.EncodeToString(sum[:])[:len("abcde")]
	return filepath.Join(filepath.Dir(socket), "."+name, "s")
}

// hideSocket makes the directory in which the library listens first. If other
// users may write beside the socket, they may make it again as soon as it is
// removed.
func hideSocket(socket string) (err error) {
	const attempts = 1000
	hidden := filepath.Dir(hiddenSocket(socket))
	if err := os.MkdirAll(filepath.Dir(hidden), 0o700); err != nil {
		return err
	}
	for range attempts {
		if err = os.RemoveAll(hidden); err == nil {
			err = os.Mkdir(hidden, 0o700)
		}
		if err == nil {
			return nil
		}
	}
	return err
}

// showSocket moves the socket to where plugins look for it, once only root can
// access it.
func showSocket(socket string) error {
	hidden := hiddenSocket(socket)
	err := os.Chmod(hidden, 0o600)
	if err == nil {
		err = os.Rename(hidden, socket)
	}
	return errors.Join(err, os.RemoveAll(filepath.Dir(hidden)))
}
