package layerstore

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

	"github.com/crius-run/crius/internal/tree"
	"github.com/crius-run/crius/storage/unpack/layers"
)

// Staging directories. They are not the library's, which are in "staging" beside these: podman 4 and
// programs as old delete all of those whenever they end, even after "podman ps". This place the library
// has for layers that it deletes, and leaves names that it does not know alone there.
const (
	StagingPlace  = "tempdirs" // in the directory of all layers, so that files can be moved from there to a layer
	StagingPrefix = "crius-unpack-"
)

// Staging is a directory in which the layers of one image are unpacked, until they are added.
type Staging struct {
	layers.Staging
	Lock *os.File // of layers.StagingLock; locked as long as any process has it open
}

// NewStaging makes a directory, which the caller must Delete. Tar-split data go to the directory splits: between
// that of layers and that of their records no file can be moved, since the library mounts the former upon itself.
func NewStaging(store cstorage.Store, splits string) (*Staging, error) {
	place := filepath.Join(root(store), store.GraphDriverName(), StagingPlace)
	if err := os.MkdirAll(place, 0o700); err != nil {
		return nil, err
	}
	const attempts = 10
	for attempt := 1; ; attempt++ {
		s, err := newStaging(place)
		if err == nil {
			s.Splits, s.IgnoreChown = splits, ignoresChown(store)
			return s, nil
		}
		// A sweep takes a directory that is not locked yet for one that was left behind.
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) || attempt == attempts {
			return nil, fmt.Errorf("directory for layers: %w", err)
		}
	}
}

func newStaging(place string) (_ *Staging, err error) {
	s := &Staging{}
	if s.Dir, err = os.MkdirTemp(place, StagingPrefix); err != nil {
		return nil, err
	}
	lock := filepath.Join(s.Dir, layers.StagingLock)
	if s.Lock, err = os.OpenFile(lock, os.O_CREATE|os.O_RDWR, 0o600); err == nil {
		err = os.NewSyscallError("lock", unix.FcntlFlock(s.Lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
	}
	if err == nil {
		_, err = os.Lstat(lock)
	}
	if err != nil {
		return nil, errors.Join(err, s.Delete())
	}
	return s, nil
}

// Swept reports whether another program has deleted the directory.
func (s *Staging) Swept() bool {
	_, err := os.Lstat(filepath.Join(s.Dir, layers.StagingLock))
	return errors.Is(err, fs.ErrNotExist)
}

// Delete deletes the directory.
func (s *Staging) Delete() error {
	err := tree.Remove(s.Dir)
	if s.Lock != nil {
		_ = s.Lock.Close()
	}
	return err
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
