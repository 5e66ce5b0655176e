package mountsconf

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Limits of the copies of one container, far beyond those of real entitlements.
const (
	maxBytes = 8 << 20
	maxFiles = 1024 // including directories
	maxDepth = 16   // of directories
	maxLinks = 40   // in the path of one file
)

// copier makes the copies for one container.
type copier struct {
	uid, gid int
	bytes    int64 // that may still be copied
	files    int
	skipped  []error
}

func (c *copier) skip(err error) { c.skipped = append(c.skipped, err) }

// copy copies a file or a directory, and reports whether there is something at to now. An error
// is one of writing: what cannot be read is skipped.
func (c *copier) copy(from, to string, depth int) (done bool, err error) {
	from, info, err := resolve(from)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil && c.files == 0 {
		err = fmt.Errorf("%s: there are more than %d files: %w", from, maxFiles, fault.Precondition)
	}
	if err == nil && depth > maxDepth {
		err = fmt.Errorf("%s: there are more than %d directories above it: %w", from, maxDepth, fault.Precondition)
	}
	if err == nil && !info.IsDir() && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is neither a directory nor a regular file: %w", from, fault.Precondition)
	}
	if err != nil {
		c.skip(err)
		return false, nil
	}
	c.files--
	if info.IsDir() {
		return true, c.copyDir(from, to, info.Mode().Perm(), depth)
	}
	return c.copyFile(from, to, info)
}

func (c *copier) copyDir(from, to string, mode fs.FileMode, depth int) error {
	names, err := regular.Names(from, maxFiles)
	if err != nil {
		c.skip(err)
	}
	if err := c.makeDir(to, mode); err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		if _, err := c.copy(filepath.Join(from, name), filepath.Join(to, name), depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (c *copier) copyFile(from, to string, info fs.FileInfo) (done bool, err error) {
	if info.Size() > c.bytes {
		c.skip(fmt.Errorf("%s: all files together have more than %d bytes: %w", from, maxBytes, fault.Precondition))
		return false, nil
	}
	source, err := os.Open(from)
	if err != nil {
		c.skip(err)
		return false, nil
	}
	defer source.Close()
	content, err := io.ReadAll(io.LimitReader(source, info.Size()))
	if err != nil {
		c.skip(err)
		return false, nil
	}
	c.bytes -= info.Size()
	return true, c.makeFile(to, content, info.Mode().Perm())
}

// makeDir makes a directory, independent of the umask.
func (c *copier) makeDir(name string, mode fs.FileMode) error {
	return errors.Join(os.Mkdir(name, 0o700), os.Chown(name, c.uid, c.gid), os.Chmod(name, mode))
}

func (c *copier) makeFile(name string, content []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	return errors.Join(err, f.Chown(c.uid, c.gid), f.Chmod(mode), f.Close())
}

// resolve follows the links in a path. No one but this process's user may be able to make it
// lead elsewhere, neither now nor before the file is opened.
func resolve(path string) (string, fs.FileInfo, error) {
	at, rest, links := "/", strings.Split(path, "/"), 0
	info, err := os.Lstat(at)
	for len(rest) > 0 && err == nil {
		name := rest[0]
		rest = rest[1:]
		if name == "" {
			continue
		}
		next := filepath.Join(at, name)
		if info, err = trusted(next); err != nil {
			return next, nil, err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		target, err := os.Readlink(next)
		if links++; err != nil || links > maxLinks {
			return next, nil, fmt.Errorf("%s: too many links: %w", path, errors.Join(err, fault.Precondition))
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return at, info, err
}

// trusted describes a file that belongs to this process's user and that no one else can write
// to. A directory with the sticky bit may be writable by others: they cannot replace files of
// this user.
func trusted(name string) (fs.FileInfo, error) {
	info, err := os.Lstat(name)
	if err != nil {
		return nil, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	link, sticky := info.Mode()&fs.ModeSymlink != 0, info.IsDir() && info.Mode()&fs.ModeSticky != 0
	if !ok || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 && !link && !sticky {
		return nil, fmt.Errorf("%s is writable by users other than UID %d: %w", name, os.Geteuid(), fault.Precondition)
	}
	return info, nil
}
