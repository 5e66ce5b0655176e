package extract

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Names by which layers say what a lower layer loses.
const (
	whiteout = ".wh."         // before the name of a file
	opaque   = ".wh..wh..opq" // all files of the directory
)

// make makes what an entry says.
func (l *layer) make(h *tar.Header, content *file) error {
	parent, base := split(h.Name)
	if base == "." && h.Typeflag != tar.TypeDir {
		return nil // the root is a directory, whatever the layer says
	}
	resolved, err := l.parents.of(parent)
	if err != nil {
		return err
	}
	mark := base != "." && strings.HasPrefix(base, whiteout)
	if err := l.enter(resolved, mark); err != nil || l.in == "" {
		return err
	}
	if mark {
		return l.whiteout(h, base)
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return l.regular(h, base, content)
	}
	there, err := l.replace(h, base)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeLink:
		return l.link(h, base)
	case tar.TypeSymlink:
		if h.Linkname == "" {
			return refuse(h.Name, "a symbolic link without a target")
		}
		err = unix.Symlink(h.Linkname, base)
		l.parents.forget()
	case tar.TypeDir:
		if !there {
			err = unix.Mkdir(base, mode(h))
		}
		l.dirs.describe(filepath.Join(l.in, base), [2]unix.Timespec{within(h.AccessTime), within(h.ModTime)})
	case tar.TypeFifo:
		err = unix.Mkfifo(base, mode(h))
	case tar.TypeChar, tar.TypeBlock:
		kind := map[byte]uint32{tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK}[h.Typeflag]
		err = unix.Mknod(base, kind|mode(h), int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))))
	default:
		return refuse(h.Name, "of the unknown type %q", h.Typeflag)
	}
	if err != nil {
		return failed(h.Name, "create", err)
	}
	return l.attributes(h, base)
}

// enter changes to a directory of the layer, which is behind no link, and makes it if it is
// missing. If something else is in its place, nothing is hidden there, which is all that a
// whiteout wants: enter returns with l.in empty.
func (l *layer) enter(dir string, forWhiteout bool) error {
	if dir == l.in {
		return nil
	}
	l.in = ""
	fd, err := openDirectory(dir)
	if errors.Is(err, unix.ENOENT) {
		var made int
		made, err = l.makeAll(dir)
		if refused := l.Check.Implied(made); refused != nil {
			return refused
		}
		if err == nil {
			fd, err = openDirectory(dir)
		}
	}
	if errors.Is(err, unix.ENOTDIR) {
		if forWhiteout {
			return nil
		}
		return refuse(dir, "which is no directory and has files")
	}
	if err != nil {
		return failed(dir, "open", err)
	}
	defer unix.Close(fd)
	if err := unix.Fchdir(fd); err != nil {
		return failed(dir, "fchdir", err)
	}
	l.in = dir
	return nil
}

// openDirectory opens a directory of the layer that is behind no link.
func openDirectory(dir string) (int, error) {
	return unix.Openat2(unix.AT_FDCWD, dir, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
}

// impliedMode is the mode of directories without entries.
const impliedMode = 0o755

// makeAll makes a directory and those above it, as for names of entries that imply them, and returns
// how many it has made.
func (l *layer) makeAll(dir string) (made int, err error) {
	for at := 1; at < len(dir); at++ {
		if next := strings.IndexByte(dir[at:], '/'); next >= 0 {
			at += next
		} else {
			at = len(dir)
		}
		err := unix.Mkdir(dir[:at], impliedMode)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err == nil {
			l.dirs.at(dir[:at])
			made++
			err = unix.Lchown(dir[:at], 0, 0) // in a directory with setgid it has the group of that
		}
		if err != nil {
			return made, err
		}
	}
	return made, nil
}

// replace removes what is in the place of an entry, except a directory that the entry changes.
func (l *layer) replace(h *tar.Header, base string) (directory bool, err error) {
	if base == "." {
		return true, nil
	}
	var st unix.Stat_t
	err = unix.Lstat(base, &st)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, failed(h.Name, "lstat", err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if h.Typeflag == tar.TypeDir {
			return true, nil
		}
		return false, l.removeDirectory(h, base)
	}
	l.parents.forget() // it may have been a link
	if err := unix.Unlink(base); err != nil {
		return false, failed(h.Name, "unlink", err)
	}
	return false, nil
}

// removeDirectory removes a directory of the layer, with all that is in it, for an entry that makes
// something else of it.
func (l *layer) removeDirectory(h *tar.Header, base string) error {
	l.parents.forget()
	if err := os.RemoveAll(base); err != nil {
		return failed(h.Name, "remove", err)
	}
	l.dirs.remove(filepath.Join(l.in, base))
	return nil
}

// whiteout marks what overlayfs shall not show of the layers below. A file that the layer has
// itself stays.
func (l *layer) whiteout(h *tar.Header, base string) error {
	if base == opaque {
		if err := unix.Setxattr(".", "trusted.overlay.opaque", []byte("y"), 0); err != nil {
			return failed(h.Name, "setxattr", err)
		}
		l.dirs.all[l.dirs.at(l.in)].opaque = true
		return nil
	}
	gone := base[len(whiteout):]
	if gone == "" || gone == "." || gone == ".." {
		return refuse(h.Name, "which hides no file")
	}
	err := unix.Mknod(gone, unix.S_IFCHR, 0)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err == nil {
		err = l.chown(gone, h)
	}
	if err != nil {
		return failed(h.Name, "create", err)
	}
	return nil
}

// regular makes a regular file.
func (l *layer) regular(h *tar.Header, base string, content *file) error {
	fd, err := create(h, base)
	if errors.Is(err, unix.EEXIST) { // to look first would take one more call for each file
		if _, err := l.replace(h, base); err != nil {
			return err
		}
		fd, err = create(h, base)
	}
	if err != nil {
		return failed(h.Name, "open", err)
	}
	if err := copyTo(fd, h, content); err != nil {
		_ = unix.Close(fd)
		return err
	}
	if err := unix.Close(fd); err != nil {
		return failed(h.Name, "close", err)
	}
	return l.attributes(h, base)
}

// create opens a new file.
func create(h *tar.Header, base string) (fd int, err error) {
	return unix.Open(base, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode(h)&0o777)
}

// copyTo writes the content of a file.
func copyTo(fd int, h *tar.Header, content *file) error {
	for {
		part, err := content.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for len(part) > 0 {
			n, err := unix.Write(fd, part)
			if err != nil && !errors.Is(err, unix.EINTR) {
				return failed(h.Name, "write", err)
			}
			part = part[max(n, 0):]
		}
	}
}

// link makes a hard link.
func (l *layer) link(h *tar.Header, base string) error {
	parent, target := split(h.Linkname)
	resolved, err := l.parents.resolve(parent)
	if err != nil {
		return err
	}
	l.parents.forget()
	path := filepath.Join(resolved, target)
	err = unix.Linkat(unix.AT_FDCWD, path, unix.AT_FDCWD, base, 0)
	var st unix.Stat_t
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return refuse(h.Name, "a hard link to %.200q, which it does not have", h.Linkname)
	case errors.Is(err, unix.EPERM) && unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return refuse(h.Name, "a hard link to the directory %.200q", h.Linkname)
	}
	if err != nil {
		return failed(h.Name, "link", err)
	}
	return l.attributes(h, base)
}

// attributes sets owner, mode, extended attributes and times, in this order: a new owner removes
// bits of the mode and capabilities.
func (l *layer) attributes(h *tar.Header, base string) error {
	symlink := h.Typeflag == tar.TypeSymlink
	if h.Typeflag == tar.TypeLink {
		var st unix.Stat_t
		if err := unix.Lstat(base, &st); err != nil {
			return failed(h.Name, "lstat", err)
		}
		symlink = st.Mode&unix.S_IFMT == unix.S_IFLNK
	}
	if err := l.chown(base, h); err != nil {
		return failed(h.Name, "chown", err)
	}
	if !symlink {
		if err := unix.Chmod(base, mode(h)); err != nil {
			return failed(h.Name, "chmod", err)
		}
	}
	if err := setXattrs(h, base); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeDir || h.Typeflag == tar.TypeLink && symlink {
		return nil
	}
	times := [2]unix.Timespec{within(h.AccessTime), within(h.ModTime)}
	if symlink {
		times = [2]unix.Timespec{unix.NsecToTimespec(h.AccessTime.UnixNano()), unix.NsecToTimespec(h.ModTime.UnixNano())}
	}
	if h.AccessTime.Before(h.ModTime) { // most archives have no time of access
		times[0] = times[1]
	}
	if err := setTimes(base, times); err != nil {
		return failed(h.Name, "set times", err)
	}
	return nil
}

// chown gives a file its owner.
func (l *layer) chown(base string, h *tar.Header) error {
	err := unix.Fchownat(unix.AT_FDCWD, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW)
	if l.IgnoreChown {
		return nil
	}
	return err
}

const paxXattr = "SCHILY.xattr."

// setXattrs sets extended attributes, as far as the file system has them.
func setXattrs(h *tar.Header, base string) error {
	for key, value := range h.PAXRecords {
		name, is := strings.CutPrefix(key, paxXattr)
		if !is || Unwanted(h.Typeflag, name) {
			continue
		}
		err := unix.Lsetxattr(base, name, []byte(value), 0)
		if errors.Is(err, unix.ENOSPC) && hasRoom(len(value)) {
			return fmt.Errorf("file %.200q of the layer has the extended attribute %.100q of %d bytes, for which the file system of the image store has no place, "+
				"though its disk is not full (ext4 holds about 4 KiB for each file); rebuild the image without it, or have the image store on XFS: %w", h.Name, name, len(value), fault.Invalid)
		}
		if err != nil && !errors.Is(err, unix.ENOTSUP) {
			return failed(h.Name, fmt.Sprintf("setxattr %.100q", name), err)
		}
	}
	return nil
}

// hasRoom reports whether the disk has room for an attribute of so many bytes, and some more.
func hasRoom(size int) bool {
	const more = 1 << 20
	var disk unix.Statfs_t
	return unix.Statfs(".", &disk) == nil && disk.Bfree*uint64(disk.Bsize) > uint64(size+more)
}

// mode returns the permissions of an entry, with the bits for setuid, setgid and sticky.
func mode(h *tar.Header) uint32 { return uint32(h.Mode & 0o7777) }

func setTimes(path string, times [2]unix.Timespec) error {
	return unix.UtimesNanoAt(unix.AT_FDCWD, path, times[:], unix.AT_SYMLINK_NOFOLLOW)
}

// within returns a time that file systems accept: others become the epoch.
func within(t time.Time) unix.Timespec {
	last := time.Unix(0, math.MaxInt64)
	if t.Before(time.Unix(0, 0)) || t.After(last) {
		return unix.Timespec{}
	}
	return unix.NsecToTimespec(t.UnixNano())
}
