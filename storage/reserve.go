package storage

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
	"github.com/crius-run/crius/internal/fault"
)

// A reserve is room on the image disk that is kept for removals alone:
// containers/storage writes its lists anew to take an image off them, and on a
// full disk nobody could otherwise make room by removing images.
type reserve string // a file

const (
	reserveName = "crius.reserve"
	// reserveSize is more than the lists of a thousand images.
	reserveSize = 8 << 20
)

func newReserve(root string) reserve { return reserve(filepath.Join(root, reserveName)) }

// keep sets the room aside, if there is any; if not, the next removal that
// succeeds tries again.
func (r reserve) keep() {
	f, err := os.OpenFile(string(r), os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		err = eintr.Retry(func() error { return unix.Fallocate(int(f.Fd()), 0, 0, reserveSize) })
		err = errors.Join(err, f.Close())
	}
	if err == nil {
		return
	}
	_ = os.Remove(string(r)) // half a reserve on a full disk is in the way
	if !errors.Is(err, unix.EOPNOTSUPP) {
		slog.Warn("cannot reserve space for removing images from a full disk", "err", err)
	}
}

// spend calls remove again with the reserve given up, if it failed on a full
// disk.
func (r reserve) spend(remove func() error) error {
	err := remove()
	if fault.DiskFull(err) && os.Remove(string(r)) == nil {
		err = remove()
	}
	if err == nil {
		r.keep()
	}
	return err
}
