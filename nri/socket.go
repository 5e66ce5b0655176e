package nri

import (
	"errors"
	"os"
	"path/filepath"
)

// hiddenSocket is where the library listens at first: it leaves the mode of its socket
// to the umask, and the directory of the socket may be open to everybody.
func hiddenSocket(socket string) string {
	return filepath.Join(filepath.Dir(socket), "."+filepath.Base(socket), "s")
}

// hideSocket makes the directory in which the library is to listen.
func hideSocket(socket string) error {
	hidden := filepath.Dir(hiddenSocket(socket))
	return errors.Join(os.RemoveAll(hidden), os.MkdirAll(filepath.Dir(hidden), 0o700), os.Mkdir(hidden, 0o700))
}

// showSocket moves the socket to where plugins look for it, once it is root's alone.
func showSocket(socket string) error {
	hidden := hiddenSocket(socket)
	err := os.Chmod(hidden, 0o600)
	if err == nil {
		err = os.Rename(hidden, socket)
	}
	return errors.Join(err, os.RemoveAll(filepath.Dir(hidden)))
}
