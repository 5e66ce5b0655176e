package layers

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"
)

// Staging directories. They are not the library's, which are in "staging" beside these: podman 4 and
// programs as old delete all of those whenever they end, even after "podman ps". This place the library
// has for layers that it deletes, and leaves names that it does not know alone there.
const (
	StagingPlace  = "tempdirs" // in the directory of all layers, so that files can be moved from there to a layer
	StagingPrefix = "crius-unpack-"
	StagingLock   = "staging.lock" // in a staging directory; locked while it is in use
)

// stagingDir is a directory into which a layer is unpacked, until it is added.
type stagingDir struct {
	path string
	lock *os.File
}

// newStagingDir makes a directory, which the caller must delete.
func newStagingDir(store cstorage.Store) (_ *stagingDir, err error) {
	place := filepath.Join(root(store), store.GraphDriverName(), StagingPlace)
	if err := os.MkdirAll(place, 0o700); err != nil {
		return nil, err
	}
	d := &stagingDir{}
	if d.path, err = os.MkdirTemp(place, StagingPrefix); err != nil {
		return nil, err
	}
	if err = os.Mkdir(d.files(), 0o755); err == nil {
		err = d.locked()
	}
	if err != nil {
		return nil, errors.Join(err, d.delete())
	}
	return d, nil
}

// locked locks the directory.
func (d *stagingDir) locked() (err error) {
	if d.lock, err = os.OpenFile(filepath.Join(d.path, StagingLock), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return err
	}
	return os.NewSyscallError("lock", unix.FcntlFlock(d.lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
}

// files returns the directory for the files of the layer.
func (d *stagingDir) files() string { return filepath.Join(d.path, "dir") }

// delete deletes the directory.
func (d *stagingDir) delete() error {
	err := os.RemoveAll(d.path)
	if d.lock != nil {
		_ = d.lock.Close()
	}
	return err
}

// swept returns the error of a layer that was unpacked into the directory. If another program has
// deleted files of it meanwhile, that is the error, whatever else may be wrong: see swept.
func (d *stagingDir) swept(err error) error {
	_, gone := os.Lstat(filepath.Join(d.path, StagingLock))
	if !errors.Is(gone, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("another program that uses the image store has deleted the directory in which a layer was being unpacked (%v); retry the pull: %w", err, gone) //nolint:errorlint // it may only look like one of the image
}

// ignoresChown reports whether the store's options say that files to which the file system refuses an
// owner belong to root.
func ignoresChown(store cstorage.Store) (ignores bool) {
	for _, option := range store.GraphOptions() {
		name, value, _ := strings.Cut(option, "=")
		if strings.EqualFold(name[strings.LastIndex(name, ".")+1:], "ignore_chown_errors") {
			ignores, _ = strconv.ParseBool(value) // the library has refused anything else
		}
	}
	return ignores
}
