package checkpoint

import (
	"archive/tar"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// Changes are what a container has changed below its root directory, beside what Diff writes: paths
// without a leading slash.
type Changes struct {
	Deleted []string // files and directories of the image that are gone
	Opaque  []string // directories in which nothing of the image is left
}

// Diff writes a tar archive of the writable layer of a container: what is in the upper directory of
// an overlay. Paths in hidden are not the layer's: something is mounted there. Nothing may change
// the directory meanwhile; Diff does not follow links out of it all the same.
func Diff(ctx context.Context, upper string, hidden []string, to io.Writer) (Changes, error) {
	root, err := os.OpenRoot(upper)
	if err != nil {
		return Changes{}, err
	}
	defer root.Close()
	d := &diff{ctx: ctx, root: root, out: tar.NewWriter(to), hidden: map[string]bool{}, links: map[inode]string{}}
	for _, at := range hidden {
		d.hidden[strings.Trim(path.Clean("/"+at), "/")] = true
	}
	err = walk(root, ".", fs.ModeDir, func(name string, _ fs.FileMode, err error) error {
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return err
		}
		return d.add(name)
	})
	if err == nil {
		err = d.out.Close()
	}
	return d.changes, err
}

// visitor is called for a file of a walk, and once more with an error for a directory that cannot be read.
type visitor func(name string, kind fs.FileMode, err error) error

// walk calls visit for a file, and for each one below it if it is a directory, parents first. visit may return
// fs.SkipDir for a directory. Unlike fs.WalkDir it takes names that are not UTF-8: a container may choose any.
func walk(root *os.Root, name string, kind fs.FileMode, visit visitor) error {
	err := visit(name, kind, nil)
	if errors.Is(err, fs.SkipDir) {
		return nil
	}
	if err != nil || !kind.IsDir() {
		return err
	}
	entries, err := readDir(root, name)
	if err != nil {
		return visit(name, kind, err)
	}
	for _, e := range entries {
		if err := walk(root, path.Join(name, e.Name()), e.Type(), visit); err != nil {
			return err
		}
	}
	return nil
}

func readDir(root *os.Root, name string) ([]fs.DirEntry, error) {
	dir, err := root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	entries, err := dir.ReadDir(-1)
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, errors.Join(err, dir.Close())
}

type inode struct{ dev, ino uint64 }

type diff struct {
	ctx     context.Context //nolint:containedctx // of the call
	root    *os.Root
	out     *tar.Writer
	hidden  map[string]bool
	links   map[inode]string // files with several names, by the first of them
	holes   int64            // bytes of sparse files that take no room
	changes Changes
}

// add writes one entry.
func (d *diff) add(name string) error {
	info, err := d.root.Lstat(name)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: no owner is known", name)
	}
	if d.hidden[name] {
		if info.IsDir() {
			return fs.SkipDir
		}
		return nil
	}
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: info.ModTime(), Format: tar.FormatPAX, PAXRecords: map[string]string{},
	}
	switch info.Mode().Type() {
	case 0:
		return d.addFile(h, st)
	case fs.ModeDir:
		return d.addDir(h)
	case fs.ModeSymlink:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = d.root.Readlink(name); err != nil {
			return err
		}
	case fs.ModeNamedPipe:
		h.Typeflag = tar.TypeFifo
	case fs.ModeDevice, fs.ModeDevice | fs.ModeCharDevice:
		if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 { // overlay's sign of what was deleted
			return d.addDeleted(name)
		}
		h.Typeflag = tar.TypeBlock
		if st.Mode&unix.S_IFMT == unix.S_IFCHR {
			h.Typeflag = tar.TypeChar
		}
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	default: // a socket, which only its process can make
		return nil
	}
	return d.out.WriteHeader(h)
}

// addDeleted notes what is gone. JSON has no place for a name that is not UTF-8: that is in the archive, as overlay has
// it in the layer.
func (d *diff) addDeleted(name string) error {
	if utf8.ValidString(name) {
		d.changes.Deleted = append(d.changes.Deleted, name)
		return nil
	}
	return d.out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeChar, Format: tar.FormatPAX})
}

func (d *diff) addDir(h *tar.Header) error {
	name := h.Name
	f, err := d.root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	opaque, err := addAttributes(h, f)
	if err != nil {
		return err
	}
	switch {
	case !opaque || name == ".":
	case utf8.ValidString(name):
		d.changes.Opaque = append(d.changes.Opaque, name)
	default:
		if err := d.addDeleted(name); err != nil {
			return err
		}
	}
	h.Typeflag, h.Name = tar.TypeDir, name+"/"
	return d.out.WriteHeader(h)
}

func (d *diff) addFile(h *tar.Header, st *syscall.Stat_t) error {
	if st.Nlink > 1 {
		self := inode{st.Dev, st.Ino}
		if first, known := d.links[self]; known {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return d.out.WriteHeader(h)
		}
		d.links[self] = h.Name
	}
	f, err := d.root.OpenFile(h.Name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := addAttributes(h, f); err != nil {
		return err
	}
	if d.holes += max(0, st.Size-st.Blocks*block); d.holes > maxHoles {
		return tooSparse(h.Name)
	}
	h.Typeflag, h.Size = tar.TypeReg, st.Size
	if err := d.out.WriteHeader(h); err != nil {
		return err
	}
	return copyFile(d.ctx, d.out, f, st.Size)
}

// maxHoles bounds what sparse files add to an archive: a container can make files of any size that
// take no room.
const maxHoles = 1 << 30

const block = 512 // of Stat_t.Blocks

func tooSparse(name string) error {
	return fmt.Errorf("with %q the holes of sparse files have more than %d bytes, which an archive would have as zeros; remove the file, or give it a volume: %w", name, int64(maxHoles), fault.Precondition)
}

// copyFile copies size bytes, unless ctx ends.
func copyFile(ctx context.Context, to io.Writer, from io.Reader, size int64) error {
	const atOnce = 16 << 20
	for size > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := io.CopyN(to, from, min(size, atOnce))
		if err != nil {
			return err
		}
		size -= n
	}
	return nil
}

// overlayAttributes are the kernel's own notes about the layer.
const overlayAttributes = "trusted.overlay."

// Prefixes of the records for attributes. A record's name cannot have "=", which the second form encodes.
const (
	plainAttribute   = "SCHILY.xattr."
	encodedAttribute = "LIBARCHIVE.xattr."
)

// recordOf returns the record of an archive for an attribute.
func recordOf(name string, value []byte) (record, text string) {
	if !strings.Contains(name, "=") {
		return plainAttribute + name, string(value)
	}
	return encodedAttribute + url.QueryEscape(name), base64.RawStdEncoding.EncodeToString(value)
}

// attributeOf returns the attribute of a record, and whether it is one.
func attributeOf(record, text string) (name string, value []byte, is bool, err error) {
	if name, is = strings.CutPrefix(record, plainAttribute); is {
		return name, []byte(text), true, nil
	}
	if name, is = strings.CutPrefix(record, encodedAttribute); !is {
		return "", nil, false, nil
	}
	if name, err = url.QueryUnescape(name); err == nil {
		value, err = base64.RawStdEncoding.DecodeString(text)
	}
	return name, value, true, err
}

// addAttributes adds the extended attributes of a file, and reports whether the file is an opaque
// directory.
func addAttributes(h *tar.Header, f *os.File) (opaque bool, err error) {
	names := make([]byte, 64<<10) // the kernel's limit
	n, err := unix.Flistxattr(int(f.Fd()), names)
	if errors.Is(err, unix.ENOTSUP) {
		return false, nil
	}
	if err != nil {
		return false, &os.PathError{Op: "list attributes of", Path: h.Name, Err: err}
	}
	value := make([]byte, 64<<10)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		n, err := unix.Fgetxattr(int(f.Fd()), name, value)
		if err != nil {
			return false, &os.PathError{Op: "read attribute " + name + " of", Path: h.Name, Err: err}
		}
		if strings.HasPrefix(name, overlayAttributes) {
			opaque = opaque || name == overlayAttributes+"opaque" && string(value[:n]) == "y"
			continue
		}
		record, text := recordOf(name, value[:n])
		h.PAXRecords[record] = text
	}
	return opaque, nil
}
