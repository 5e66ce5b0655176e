// Package extract makes the files of one layer from its archive, in one pass over it: it checks each
// entry before it makes a file, and writes down what the archive had beside the contents of files
// (tar-split), from which the layer can be rebuilt bit by bit.
//
// archive/tar alone says what an entry is, and nothing else reads the archive, so no two parsers can
// differ about it.
package extract

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/thread"
)

// Check refuses entries of a layer.
type Check interface {
	// Entry is called for each entry, global PAX headers included, before anything is made of it.
	Entry(*tar.Header) error
	// Implied is called when directories were made that have no entries, but are in the name of one.
	Implied(count int) error
	// Holes is called before bytes of a sparse file are written that are not in the archive.
	Holes(bytes int64) error
}

// Order says which layer becomes which files.
type Order struct {
	Content     io.Reader // the archive, uncompressed; it is read to its end
	Dir         *os.File  // an empty directory
	Split       io.Writer // gets the layer's tar-split data, which are JSON
	Check       Check
	IgnoreChown bool // files to which the file system refuses an owner belong to root
}

// Result is what a layer has.
type Result struct {
	Size    int64 // bytes of the archive
	Implied Implied
}

// Layer makes the files of a layer. Errors of the archive are fault.Invalid; those of the context,
// the content, the check, the writer and the disk are returned as they are.
//
// The directory is the root of the thread that makes the files, so neither a name nor a link of
// the layer leads out of it. Directories without entries get the mode 0755 and belong to root.
func Layer(ctx context.Context, o Order) (result Result, err error) {
	err = thread.Run(func() error {
		if err := enter(o.Dir); err != nil {
			return err
		}
		l := newLayer(o)
		defer l.free()
		if err := l.run(ctx); err != nil {
			return err
		}
		result = Result{Size: l.archive.size, Implied: l.dirs.left()}
		return nil
	})
	return result, err
}

// enter makes a directory the root of this thread alone, which has no umask then.
func enter(dir *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	unix.Umask(0)
	if err := unix.Fchdir(int(dir.Fd())); err != nil {
		return os.NewSyscallError("fchdir", err)
	}
	if err := unix.Chroot("."); err != nil {
		return os.NewSyscallError("chroot", err)
	}
	return os.NewSyscallError("chmod", unix.Chmod(".", impliedMode))
}

// layer is a layer whose files are being made, in the root directory of this thread.
type layer struct {
	Order

	archive *archive
	entries *tar.Reader // of archive
	split   *splitter
	parents parents
	buffers *buffers

	in   string // the thread's directory; empty: not known
	dirs *directories
}

// buffers are what each layer needs, however small it is.
type buffers struct {
	from    *bufio.Reader
	to      *bufio.Writer
	content []byte
}

var pool = sync.Pool{New: func() any {
	const readAtOnce, writtenAtOnce, split = 128 << 10, 256 << 10, 32 << 10
	return &buffers{bufio.NewReaderSize(nil, readAtOnce), bufio.NewWriterSize(nil, split), make([]byte, writtenAtOnce)}
}}

func newLayer(o Order) *layer {
	b := pool.Get().(*buffers)
	b.from.Reset(o.Content)
	b.to.Reset(o.Split)
	a := &archive{from: b.from}
	return &layer{
		Order: o, archive: a, entries: tar.NewReader(a), split: newSplitter(b.to), buffers: b, dirs: newDirectories(),
	}
}

// free lets another layer use the buffers.
func (l *layer) free() {
	l.buffers.from.Reset(nil)
	l.buffers.to.Reset(nil)
	pool.Put(l.buffers)
}

func (l *layer) run(ctx context.Context) error {
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		header, err := l.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if err := l.entry(header); err != nil {
			return err
		}
	}
	if err := l.rest(); err != nil {
		return err
	}
	return l.dirs.finish(ctx)
}

// next returns the next entry, or io.EOF.
func (l *layer) next() (*tar.Header, error) {
	l.archive.keep()
	header, err := l.entries.Next()
	raw := l.archive.kept()
	if err := l.archive.failed; err != nil {
		return nil, err
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, noArchive(err)
	}
	if splitErr := l.split.segment(raw); splitErr != nil {
		return nil, splitErr
	}
	if err != nil {
		return nil, io.EOF
	}
	return header, l.Check.Entry(header)
}

// entry makes what an entry says, and reads all of it.
func (l *layer) entry(h *tar.Header) error {
	content := &file{layer: l, left: h.Size}
	if headerOnly(h.Typeflag) {
		content.left = 0
	}
	if h.Typeflag != tar.TypeXGlobalHeader {
		if err := l.make(h, content); err != nil {
			return err
		}
	}
	if err := content.discard(); err != nil {
		return err
	}
	return l.split.file(h.Name, content.size, content.sum)
}

// rest reads what follows the entries, which is padding.
func (l *layer) rest() error {
	for {
		n, err := l.archive.Read(l.buffers.content)
		if splitErr := l.split.segment(l.buffers.content[:n]); splitErr != nil {
			return splitErr
		}
		if errors.Is(err, io.EOF) {
			return l.split.flush()
		}
		if err != nil {
			return err
		}
	}
}

// headerOnly reports whether an entry of this type has no content, whatever its size says.
func headerOnly(kind byte) bool {
	return kind >= tar.TypeLink && kind <= tar.TypeFifo || kind == tar.TypeXGlobalHeader
}

// ErrNoArchive says that the content of a layer cannot be parsed.
var ErrNoArchive = errors.New("it is no tar archive that can be unpacked")

// noArchive returns the error of an archive that cannot be parsed.
func noArchive(err error) error {
	return fmt.Errorf("%w: %v; rebuild the image: %w", ErrNoArchive, err, fault.Invalid) //nolint:errorlint // an end that comes too early is no fault of the connection
}

// refuse returns the error for an entry that cannot be unpacked.
func refuse(name, why string, args ...any) error {
	return fmt.Errorf("it has %.200q, %s; rebuild the image without it: %w", name, fmt.Sprintf(why, args...), fault.Invalid)
}

// failed returns the error of a system call for a file of the layer. It is fault.Invalid if the file
// system cannot have such a file.
func failed(path, what string, err error) error {
	err = fmt.Errorf("file %.200q of the layer: %w", path, os.NewSyscallError(what, err))
	for _, impossible := range []unix.Errno{unix.EINVAL, unix.ENAMETOOLONG, unix.EMLINK, unix.E2BIG, unix.ERANGE, unix.EOVERFLOW} {
		if errors.Is(err, impossible) {
			return fmt.Errorf("%w, which the file system of the image store does not allow; rebuild the image without it: %w", err, fault.Invalid)
		}
	}
	return err
}

// Unwanted reports whether an entry of a layer, of type kind, must not get the extended attribute.
// With trusted.* overlayfs makes a directory show another, or a file the content of another,
// anywhere in the layers. The kernel accepts user.* only for files and directories. A hard link may
// lead to something else, and a file to which it leads has attributes of its own.
//
// security.selinux belongs to the node's policy.
func Unwanted(kind byte, name string) bool {
	if strings.HasPrefix(name, "user.") {
		return kind >= tar.TypeLink && kind <= tar.TypeFifo && kind != tar.TypeDir
	}
	return strings.HasPrefix(name, "trusted.") || name == "security.selinux"
}
