package checkpoint

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/tree"
)

// maxEntries bounds the entries of an archive of Diff.
const maxEntries = 1 << 22

// Apply makes in the directory root what Diff has written of another one: changes first, then the archive. It
// is the other half of Diff, and no general reader of archives. No name leads out of root or through a link, and
// there are no devices. Nothing else may change root meanwhile.
func Apply(ctx context.Context, archive io.Reader, changes Changes, root string) error {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: root, Err: err}
	}
	a := applier{ctx: ctx, root: fd}
	defer a.close()
	for _, name := range slices.Concat(changes.Deleted, changes.Opaque) {
		if err := a.remove(name); err != nil {
			return fmt.Errorf("remove %.100q: %w", name, err)
		}
	}
	in := tar.NewReader(bufio.NewReaderSize(archive, 1<<20))
	for count := 0; ; count++ {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return a.finish()
		}
		if err == nil && count >= maxEntries {
			err = fmt.Errorf("more than %d entries: %w", maxEntries, fault.Invalid)
		}
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			err = a.add(h, in)
		}
		if err != nil {
			if h != nil {
				err = fmt.Errorf("%.100q: %w", h.Name, err)
			}
			return err
		}
	}
}

type applier struct {
	ctx  context.Context //nolint:containedctx // of the call
	root int
	dirs []*tar.Header // whose times are set last
}

func (a *applier) close() { _ = unix.Close(a.root) }

// open opens what has a local name, behind no link.
func (a *applier) open(name string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(a.root, name, &unix.OpenHow{
		Flags: flags | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// parent opens the directory of a name, and returns the last part of it.
func (a *applier) parent(name string) (dir *os.File, base string, err error) {
	clean := strings.TrimSuffix(name, "/")
	if !filepath.IsLocal(clean) || path.Clean(clean) != clean || strings.ContainsRune(clean, 0) {
		return nil, "", fmt.Errorf("the path is not allowed: %w", fault.Invalid)
	}
	above, base := path.Split(clean)
	dir, err = a.open("./"+above, unix.O_RDONLY|unix.O_DIRECTORY)
	return dir, base, err
}

// remove removes a name and what is below it.
func (a *applier) remove(name string) error {
	dir, base, err := a.parent(name)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	if base == "." {
		return fmt.Errorf("the path is not allowed: %w", fault.Invalid)
	}
	return tree.Remove(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), base))
}

// add makes one entry. What is there and no directory is replaced.
func (a *applier) add(h *tar.Header, content io.Reader) error {
	const most = 1<<32 - 2
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) > most || int64(h.Gid) > most || h.Mode&^0o7777 != 0 {
		return fmt.Errorf("owner %d:%d or mode %o is not allowed: %w", h.Uid, h.Gid, h.Mode, fault.Invalid)
	}
	if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 { // see addDeleted
		return a.remove(h.Name)
	}
	dir, base, err := a.parent(h.Name)
	if err != nil {
		return err
	}
	defer dir.Close()
	at := int(dir.Fd())
	if h.Typeflag == tar.TypeDir {
		return a.addDir(h, at, base)
	}
	if err := unix.Unlinkat(at, base, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg:
		return a.addFile(h, at, base, content)
	case tar.TypeLink:
		first, name, err := a.parent(h.Linkname)
		if err != nil {
			return err
		}
		defer first.Close()
		return unix.Linkat(int(first.Fd()), name, at, base, 0)
	case tar.TypeSymlink:
		err = unix.Symlinkat(h.Linkname, at, base)
	case tar.TypeFifo:
		err = unix.Mkfifoat(at, base, 0o600)
	default:
		return fmt.Errorf("an entry of type %q cannot be restored: %w", h.Typeflag, fault.Precondition)
	}
	if err == nil {
		err = unix.Fchownat(at, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil && h.Typeflag == tar.TypeFifo {
		err = unix.Fchmodat(at, base, uint32(h.Mode), 0) // it was made here, and is no link
	}
	if err != nil {
		return err
	}
	return unix.UtimesNanoAt(at, base, times(h), unix.AT_SYMLINK_NOFOLLOW)
}

func (a *applier) addDir(h *tar.Header, at int, base string) error {
	err := unix.Mkdirat(at, base, 0o700)
	if errors.Is(err, unix.EEXIST) {
		var st unix.Stat_t
		if err = unix.Fstatat(at, base, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if err = unix.Unlinkat(at, base, 0); err == nil {
				err = unix.Mkdirat(at, base, 0o700)
			}
		}
	}
	if err != nil {
		return err
	}
	f, err := a.open(h.Name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer f.Close()
	a.dirs = append(a.dirs, h)
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err == nil && base == "." &&
		int(st.Uid) == h.Uid && int(st.Gid) == h.Gid && int64(st.Mode&0o7777) == h.Mode {
		return nil // the root of a layer to which nothing was written may be read-only
	}
	return setAttributes(f, h)
}

func (a *applier) addFile(h *tar.Header, at int, base string, content io.Reader) error {
	fd, err := unix.Openat(at, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), h.Name)
	err = copyFile(a.ctx, f, content, h.Size)
	if err == nil {
		err = setAttributes(f, h)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return unix.UtimesNanoAt(at, base, times(h), unix.AT_SYMLINK_NOFOLLOW)
}

// setAttributes sets the owner first: chown(2) takes setuid bits and capabilities away.
func setAttributes(f *os.File, h *tar.Header) error {
	fd := int(f.Fd())
	if err := unix.Fchown(fd, h.Uid, h.Gid); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, uint32(h.Mode)); err != nil {
		return err
	}
	for record, text := range h.PAXRecords {
		name, value, is, err := attributeOf(record, text)
		if err != nil {
			return fmt.Errorf("record %.100q: %w: %w", record, err, fault.Invalid)
		}
		if !is || strings.HasPrefix(name, overlayAttributes) {
			continue
		}
		if err := unix.Fsetxattr(fd, name, value, 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
			return fmt.Errorf("set attribute %s: %w", name, err)
		}
	}
	return nil
}

// finish sets the times of directories, in which nothing is made any more.
func (a *applier) finish() error {
	for _, h := range slices.Backward(a.dirs) {
		dir, base, err := a.parent(h.Name)
		if err != nil {
			return err
		}
		err = unix.UtimesNanoAt(int(dir.Fd()), base, times(h), unix.AT_SYMLINK_NOFOLLOW)
		if err := errors.Join(err, dir.Close()); err != nil && !errors.Is(err, unix.EROFS) {
			return err
		}
	}
	return nil
}

func times(h *tar.Header) []unix.Timespec {
	at, _ := unix.TimeToTimespec(h.ModTime) // fails for times that a 32-bit kernel does not have, either
	return []unix.Timespec{at, at}
}
