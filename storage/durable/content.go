package durable

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/archive"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/unpack/layerstore"
)

// content compares a layer with its digest. The digest covers only the content of files; owners,
// modes, links and whiteouts are compared with the headers of the archive.
func (s *check) content(ctx context.Context, layer *cstorage.Layer, dir string) (err error) {
	if layer.UncompressedDigest.Validate() != nil {
		return nil // its content is not recorded
	}
	diff := layerstore.Rebuild(s.store, layer)
	defer func() { err = errors.Join(err, diff.Close()) }()
	digester := layer.UncompressedDigest.Algorithm().Digester()
	all := io.TeeReader(s.watched(ctx, diff), digester.Hash())
	c := newComparison(dir, len(layer.UIDMap) == 0 && len(layer.GIDMap) == 0)
	err = garbled(c.readAll(all))
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if got := digester.Digest(); err == nil && got != layer.UncompressedDigest {
		err = damage("its digest is %s, not %s", got, layer.UncompressedDigest)
	}
	if err != nil && c.behind != "" {
		// The library looks for it at the wrong end of the link.
		slog.Warn("cannot verify layer: it has a file behind a symbolic link", "layer", layer.ID, "file", c.behind, "err", err)
		return nil
	}
	if err == nil {
		err = c.result()
	}
	if err == nil {
		return nil
	}
	if name, unread := layerstore.Replaced(s.store, layer); unread == nil && name != "" {
		slog.Warn("cannot verify layer: one of its files replaces another one", "layer", layer.ID, "file", name, "err", err)
		return nil
	}
	return err
}

// watched reads from until ctx ends, and calls Progress for each part.
func (s *check) watched(ctx context.Context, from io.Reader) io.Reader {
	return reading(func(p []byte) (int, error) {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		if s.manifest.cfg.Progress != nil {
			s.manifest.cfg.Progress()
		}
		return from.Read(p)
	})
}

type reading func(p []byte) (int, error)

func (r reading) Read(p []byte) (int, error) { return r(p) }

// garbled distinguishes an archive that cannot be rebuilt, although no system call failed, from one
// that cannot be read.
func garbled(err error) error {
	var failed syscall.Errno
	if err == nil || errors.Is(err, errDamaged) || errors.As(err, &failed) || errors.Is(err, cstorage.ErrLayerUnknown) {
		return err
	}
	return damage("%w", err)
}

// sameFile compares a file with its entry in the archive.
func sameFile(dir, name string, h *tar.Header) error {
	base := path.Base(name)
	file := filepath.Join(dir, path.Dir(name), strings.TrimPrefix(base, archive.WhiteoutPrefix))
	var st unix.Stat_t
	if base == archive.WhiteoutOpaqueDir {
		value := make([]byte, 1)
		file = filepath.Join(dir, path.Dir(name))
		n, err := unix.Lgetxattr(file, "trusted.overlay.opaque", value)
		if err != nil && !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.ERANGE) {
			return &os.PathError{Op: "getxattr", Path: file, Err: err}
		}
		if err != nil || n != 1 || value[0] != 'y' {
			return damage("%s is not marked opaque", file)
		}
		return nil
	}
	if err := unix.Lstat(file, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: file, Err: err}
	}
	if strings.HasPrefix(base, archive.WhiteoutPrefix) {
		if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
			return damage("%s is not a whiteout", file)
		}
		return nil
	}
	if h.Typeflag == tar.TypeSymlink {
		target, err := os.Readlink(file)
		if err != nil && !errors.Is(err, unix.EINVAL) { // not a link
			return err
		}
		if target != h.Linkname {
			return damage("symbolic link %s points to %q, not to %q", file, target, h.Linkname)
		}
	}
	if h.Typeflag == tar.TypeReg && st.Size != h.Size {
		return damage("%s has %d bytes, not %d", file, st.Size, h.Size)
	}
	return nil
}

// sameMode compares owner and mode of a file with its only entry.
func sameMode(dir, name string, h *tar.Header, owners bool) error {
	if strings.HasPrefix(path.Base(name), archive.WhiteoutPrefix) {
		return nil
	}
	var st unix.Stat_t
	file := filepath.Join(dir, name)
	if err := unix.Lstat(file, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: file, Err: err}
	}
	if owners && (int(st.Uid) != h.Uid || int(st.Gid) != h.Gid) {
		return damage("%s belongs to %d:%d, not to %d:%d", file, st.Uid, st.Gid, h.Uid, h.Gid)
	}
	if want := uint32(h.Mode) & 0o7777; h.Typeflag != tar.TypeSymlink && st.Mode&0o7777 != want {
		return damage("%s has the mode %o, not %o", file, st.Mode&0o7777, want)
	}
	return nil
}
