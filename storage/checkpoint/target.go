package checkpoint

import (
	"bufio"
	"cmp"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/flock"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/tree"
)

// Target is the caller's directory, which stays open. Its methods create, rename and remove names in
// that directory, wherever it is moved.
type Target struct{ dir *os.File }

// OpenTarget opens a directory. The error is fault.NotFound if there is none, fault.Precondition if it
// is something else.
func OpenTarget(path string) (*Target, error) {
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: create the directory first: %w", err, fault.NotFound)
	case errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("%w: %w", err, fault.Precondition)
	case err != nil:
		return nil, err
	}
	return &Target{dir}, nil
}

// Close closes the directory.
func (t *Target) Close() { _ = flock.Release(t.dir) } // nothing is written through it

// path returns a path that leads, for other programs too, to the directory for as long as this process has it open.
func (t *Target) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), t.dir.Fd()) }

// Identity identifies the directory: each file system counts its inodes for itself.
func (t *Target) Identity() (device, inode uint64, err error) {
	var st unix.Stat_t
	err = unix.Fstat(int(t.dir.Fd()), &st)
	return st.Dev, st.Ino, err
}

// Place returns the place of the directory. The error is fault.Precondition if it belongs to another user than
// this process, or others may write in it.
func (t *Target) Place() (mount.Place, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(t.dir.Fd()), &st); err != nil {
		return mount.Place{}, err
	}
	if int(st.Uid) != os.Getuid() || st.Mode&0o022 != 0 {
		return mount.Place{}, fmt.Errorf("other users can write in it (owner %d, mode %#o), and could change files before they are signed; give it to root with the mode 0700: %w", st.Uid, st.Mode&0o7777, fault.Precondition)
	}
	path, err := os.Readlink(t.path())
	if err != nil {
		return mount.Place{}, err
	}
	return mount.PlaceOf(path)
}

// Claim keeps others that call Claim out of the directory until the target is closed. The error is
// fault.Unavailable if somebody else has it.
func (t *Target) Claim() error {
	err := flock.Try(t.dir)
	if errors.Is(err, flock.ErrBusy) {
		return fmt.Errorf("another checkpoint is being written to it, try again later: %w", fault.Unavailable)
	}
	return err
}

// Empty reports whether nothing is in the directory.
func (t *Target) Empty() (bool, error) {
	dir, err := os.Open(t.path())
	if err != nil {
		return false, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return len(names) == 0, err
}

// Has reports whether anything has the name, even a link that leads nowhere.
func (t *Target) Has(name string) bool {
	var st unix.Stat_t
	return unix.Fstatat(int(t.dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil
}

// PutArchive writes a part as an archive under a temporary name and renames it when it is on the disk.
// What has the name already is not replaced: that is fault.Exists.
func (t *Target) PutArchive(ctx context.Context, p Part, temporary, name string) error {
	return t.put(temporary, name, func(f *os.File) error {
		to := bufio.NewWriterSize(f, 1<<20)
		if err := p.pack(ctx, to); err != nil {
			return err
		}
		return to.Flush()
	})
}

// PutRequest writes the file Request in the same way.
func (t *Target) PutRequest(text []byte, temporary string) error {
	return t.putText(temporary, Request, text)
}

// PutManifest writes the manifest of a pod's checkpoint and its signature in the same way.
func (t *Target) PutManifest(m PodManifest, key ed25519.PrivateKey, temporary string) error {
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	text = append(text, '\n')
	if len(text) > MaxManifest {
		return fmt.Errorf("%s would have %d bytes, at most %d are allowed: %w", Manifest, len(text), MaxManifest, fault.Exhausted)
	}
	return cmp.Or(t.putText(temporary, Signature, sign(key, text)), t.putText(temporary, Manifest, text))
}

func (t *Target) putText(temporary, name string, text []byte) error {
	return t.put(temporary, name, func(f *os.File) error {
		_, err := f.Write(text)
		return err
	})
}

// PutTree archives a directory under a name. It may be called for a directory that others change: a
// file that shrinks meanwhile is an error.
func (t *Target) PutTree(ctx context.Context, name, dir string) error {
	f, err := t.create(name)
	if err != nil {
		return err
	}
	to := bufio.NewWriterSize(f, 1<<20)
	_, err = Diff(ctx, dir, nil, to)
	if err == nil {
		err = to.Flush()
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func (t *Target) create(name string) (*os.File, error) {
	fd, err := unix.Openat(int(t.dir.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "create", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (t *Target) put(temporary, name string, write func(*os.File) error) error {
	at := int(t.dir.Fd())
	f, err := t.create(temporary)
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	err = unix.Renameat2(at, temporary, at, name, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) { // a file system without that flag
		err = unix.Linkat(at, temporary, at, name, 0)
		if err == nil {
			err = unix.Unlinkat(at, temporary, 0)
		}
	}
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s exists already, choose another name: %w", name, fault.Exists)
	}
	if err != nil {
		return &os.PathError{Op: "rename", Path: temporary, Err: err}
	}
	return t.Sync()
}

// Sync returns when the names are on the disk.
func (t *Target) Sync() error { return t.dir.Sync() }

// PartIn returns the part with a name in the directory. It can be used while the target is open.
func (t *Target) PartIn(name string) Part { return Part{filepath.Join(t.path(), name)} }

// Remove removes names and what is below them. A name that does not exist is no error.
func (t *Target) Remove(names ...string) (err error) {
	for _, name := range names {
		err = errors.Join(err, tree.Remove(filepath.Join(t.path(), name)))
	}
	return err
}
