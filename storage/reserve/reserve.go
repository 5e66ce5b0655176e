// Package reserve keeps free space on the image disk for removals, and for the start before them:
// containers/storage rewrites its lists to remove an image, so on a full disk nobody could
// otherwise free space by removing images.
package reserve

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
	"github.com/crius-run/crius/internal/fault"
)

// File is the file that occupies the space.
type File string

const (
	// Name is the name of the file in the directory of the image store.
	Name = "crius.reserve"
	// size is more than the lists of a thousand images.
	size = 8 << 20
)

// least is the free space that a few small files need.
const least = 1 << 20

// Full reports whether the disk of a directory is too full for a few small files.
func Full(dir string) bool {
	var st unix.Statfs_t
	err := eintr.Retry(func() error { return unix.Statfs(dir, &st) })
	return err == nil && st.Bavail*uint64(st.Bsize) < least
}

// In returns the reserve of the image store in a directory.
func In(root string) File { return File(filepath.Join(root, Name)) }

// Keep makes the reserve, if the disk has room for it. If not, the next successful removal tries
// again.
func (r File) Keep() {
	f, err := os.OpenFile(string(r), os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		err = eintr.Retry(func() error { return unix.Fallocate(int(f.Fd()), 0, 0, size) })
		err = errors.Join(err, f.Close())
	}
	if err == nil {
		return
	}
	_ = os.Remove(string(r)) // an incomplete reserve on a full disk is useless
	if !errors.Is(err, unix.EOPNOTSUPP) {
		slog.Warn("cannot reserve space for removing images from a full disk", "err", err)
	}
}

// Spend calls f. If the disk is full, it deletes the reserve before, since a call that fails half-way
// may not be repeatable. If only f finds the disk full, Spend deletes the reserve and calls f again.
func (r File) Spend(f func() error) error {
	spent := Full(filepath.Dir(string(r))) && os.Remove(string(r)) == nil
	err := f()
	if fault.DiskFull(err) && os.Remove(string(r)) == nil {
		err = f()
	}
	if err == nil || spent && !fault.DiskFull(err) {
		r.Keep()
	}
	return err
}
