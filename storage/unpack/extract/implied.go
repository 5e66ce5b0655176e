package extract

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/eintr"
	"github.com/crius-run/crius/internal/fault"
)

// Implied are the directories that a layer has only because they are in the names of its entries,
// the root included, and those that they are in. In a container such a directory is the same one as
// in the layers below, so it has the attributes of that.
type Implied []impliedDirectory

type impliedDirectory struct {
	place
	implied bool
	found   bool // it has its attributes
	hidden  bool // it is in none of the layers that are left
	opaque  int  // number of the layer that hides what lower ones have in it, from 1; 0: none does
	there   bool // in the layer that is looked at
	wanted  bool // it, or a directory in it, needs attributes
}

// MaxLookups is a number of directories that the layers of an image look up in those below, more
// than any known image needs by far.
const MaxLookups = 10_000_000

// ErrBelowMissing says that a layer is missing that should be below another.
var ErrBelowMissing = errors.New("a layer below it is missing")

// Inherit gives the implied directories of a layer the owner, mode, extended attributes and times
// of the directories that they cover in the layers below, from the upper one down. A directory that
// covers none, since the layers have nothing there, or a file, link or whiteout, or since the
// directory that it is in was made opaque, stays as it is. Links are not followed.
//
// Each look at a directory takes one of lookups; the error is fault.Invalid if there are too few.
// If one of the layers below has been removed, the error is ErrBelowMissing.
func (i Implied) Inherit(ctx context.Context, layer string, below []string, lookups *int) error {
	own, err := openRoot(layer)
	if err != nil {
		return err
	}
	defer own.Close()
	to := inheritance{Implied: slices.Clone(i), own: int(own.Fd()), lookups: lookups}
	for n, path := range below {
		if !to.want() {
			break
		}
		if err := to.from(ctx, n+2, path); err != nil {
			return fmt.Errorf("attributes of directories without entries, from %s: %w", path, err)
		}
	}
	return nil
}

// openRoot opens the root of a layer. The store says where it is: for a layer of an additional layer
// store the path is a link.
func openRoot(path string) (*os.File, error) {
	return os.OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
}

// inheritance is one call of Inherit. It counts layers from 1, which is the one that inherits.
type inheritance struct {
	Implied
	own     int // descriptor of the layer
	lookups *int
}

// want finds out which directories must be looked up in the next layer, and reports whether any is.
func (to *inheritance) want() bool {
	for i := range to.Implied {
		d := &to.Implied[i]
		d.wanted = d.implied && !d.found
		if i > 0 {
			above := &to.Implied[d.in]
			d.hidden = d.hidden || above.hidden || above.opaque > 0
		}
		d.wanted = d.wanted && !d.hidden
	}
	for i := len(to.Implied) - 1; i > 0; i-- {
		if d := &to.Implied[i]; d.wanted {
			to.Implied[d.in].wanted = true
		}
	}
	return len(to.Implied) > 0 && to.Implied[0].wanted
}

// from takes what the next layer below has.
func (to *inheritance) from(ctx context.Context, number int, path string) error {
	root, err := openRoot(path)
	if errors.Is(err, unix.ENOENT) {
		return ErrBelowMissing
	}
	if err != nil {
		return err
	}
	defer root.Close()
	for i := range to.Implied {
		d := &to.Implied[i]
		if d.there = false; !d.wanted || i > 0 && !to.Implied[d.in].there {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if *to.lookups--; *to.lookups < 0 {
			return fmt.Errorf("its layers have too many directories without entries (%d lookups in lower layers); rebuild the image with an entry for each directory: %w", MaxLookups, fault.Invalid)
		}
		if err := to.look(i, number, int(root.Fd())); err != nil {
			return err
		}
	}
	return nil
}

// look looks at a directory in a layer below.
func (to *inheritance) look(i, number, root int) error {
	d := &to.Implied[i]
	fd, err := openBelow(root, to.path(i))
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		d.hidden = true
		return nil
	case err != nil:
		return err
	}
	defer unix.Close(fd)
	d.there = true
	if i > 0 && d.opaque == 0 && isOpaque(fd) {
		d.opaque = number
	}
	if !d.implied || d.found {
		return nil
	}
	d.found = true
	return to.copyAttributes(fd, to.path(i))
}

func (to *inheritance) path(i int) string {
	return pathOf(i, func(i int) place { return to.Implied[i].place })
}

// openBelow opens a directory below another, behind no link. The directory that it is in must exist.
func openBelow(root int, path string) (int, error) {
	fd := -1
	err := eintr.Retry(func() (err error) {
		fd, err = unix.Openat2(root, path, &unix.OpenHow{
			Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		return err
	})
	if err != nil {
		return -1, &os.PathError{Op: "openat2", Path: path, Err: err}
	}
	return fd, nil
}

// isOpaque reports whether overlayfs shows nothing of lower layers in a directory.
func isOpaque(fd int) bool {
	var value [1]byte
	n, err := unix.Fgetxattr(fd, "trusted.overlay.opaque", value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

// copyAttributes gives a directory of the layer the attributes of one below.
func (to *inheritance) copyAttributes(from int, path string) error {
	var st, has unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return failed(path, "fstat", err)
	}
	fd, err := openBelow(to.own, path)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Fstat(fd, &has); err != nil {
		return failed(path, "fstat", err)
	}
	if st.Uid != has.Uid || st.Gid != has.Gid { // or the file system may have no owners
		if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil {
			return failed(path, "fchown", err)
		}
	}
	if err := unix.Fchmod(fd, st.Mode&0o7777); err != nil {
		return failed(path, "fchmod", err)
	}
	if err := copyXattrs(fd, from, path); err != nil {
		return err
	}
	// Nobody else changes the layer, so the path has no link still.
	if err := unix.UtimesNanoAt(to.own, path, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failed(path, "set times", err)
	}
	return nil
}

// copyXattrs copies the extended attributes that an entry could have set.
func copyXattrs(to, from int, path string) error {
	const most = 64 << 10 // of the list, and of a value: a limit of the kernel
	size, err := unix.Flistxattr(from, nil)
	if size <= 0 {
		if err != nil && !errors.Is(err, unix.ENOTSUP) {
			return failed(path, "flistxattr", err)
		}
		return nil
	}
	names := make([]byte, most)
	if size, err = unix.Flistxattr(from, names); err != nil {
		return failed(path, "flistxattr", err)
	}
	for name := range strings.SplitSeq(string(names[:size]), "\x00") {
		if name == "" || Unwanted(tar.TypeDir, name) {
			continue
		}
		value := make([]byte, most)
		n, err := unix.Fgetxattr(from, name, value)
		if err == nil {
			err = unix.Fsetxattr(to, name, value[:n], 0)
		}
		if err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.ENODATA) {
			return failed(path, fmt.Sprintf("copy xattr %.100q", name), err)
		}
	}
	return nil
}
