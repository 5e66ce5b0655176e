package layers

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/archive"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/headers"
)

// Limits of layers. Each is far above any known image: the largest images may have a million or two
// files, no path of a hundred directories, and a few thousand owners.
//
// MaxDepth is how many directories a path may have above its last part.
const (
	maxFiles       = 4_000_000 // entries of all layers of an image, and directories implied by their names
	maxDirectories = 1_000_000 // that are entries: the unpacker remembers each until the end of the layer
	MaxDepth       = 256       // directories of a path: each system call takes longer with more
	maxOwners      = 65_536    // uids, and gids, of a layer; a pod's user namespace has as many
)

// Limits of the holes in sparse files of an image's layers in total. Holes become zeros on the
// disk. gzip could not have packed more zeros into the layers.
const (
	holesPerByte = 1032
	smallHoles   = 256 << 20 // bytes, allowed in any case
)

// BoundFiles returns a store for the layers of one image, added one after the other. PutLayer
// refuses, with fault.Invalid, more files, deeper directories, more owners and more bytes of sparse
// files than any image needs, before they are unpacked.
func BoundFiles(store cstorage.Store) cstorage.Store { return &fileStore{Store: store} }

type fileStore struct {
	cstorage.Store
	totals // of the layers that have been added
}

// totals are sums over the layers of an image.
type totals struct {
	files       int
	directories int   // of files
	holes       int64 // bytes of sparse files that are holes
	blobs       int64 // bytes of compressed layers
}

// PutLayer implements cstorage.Store.
func (s *fileStore) PutLayer(id, parent string, names []string, mountLabel string, writeable bool, options *cstorage.LayerOptions, diff io.Reader) (*cstorage.Layer, int64, error) {
	if diff == nil {
		return s.Store.PutLayer(id, parent, names, mountLabel, writeable, options, diff)
	}
	c, err := newCounted(diff, s.totals)
	if err != nil {
		return nil, -1, err
	}
	defer func() { _ = c.Close() }() // Read has returned any error of the blob
	if options != nil && options.OriginalSize == nil {
		with := *options
		with.OriginalSize = &c.blob // the library looks at it after it has read everything
		options = &with
	}
	layer, size, err := s.Store.PutLayer(id, parent, names, mountLabel, writeable, options, c)
	if c.refused != nil { // the library has only the child's text
		return nil, -1, c.refused
	}
	if err == nil {
		blob, err := c.size()
		if err != nil {
			return nil, -1, err
		}
		s.totals = c.totals
		s.blobs += blob
	}
	return layer, size, err
}

// counted is the decompressed archive of a layer.
type counted struct {
	*headers.Reader
	diff       io.Reader // the layer as it comes, compressed
	before     totals    // of the image without it
	archive    io.ReadCloser
	blob       int64  // bytes of diff that have been read
	totals            // of the image up to here, without the bytes of this layer
	last       string // name of the previous entry
	uids, gids map[uint32]struct{}
	refused    error
}

// newCounted begins to read a layer of an image whose other layers have these totals.
func newCounted(diff io.Reader, before totals) (*counted, error) {
	c := &counted{diff: diff, before: before, totals: before, uids: map[uint32]struct{}{}, gids: map[uint32]struct{}{}}
	var err error
	if c.archive, err = archive.DecompressStream(io.TeeReader(diff, (*counter)(&c.blob))); err != nil {
		return nil, err
	}
	from := bufio.NewReaderSize(c.archive, 32<<10)
	first, _ := from.Peek(10) // an error comes back with the next read
	if archive.DetectCompression(first) != archive.Uncompressed {
		return nil, errors.Join(fmt.Errorf("it is compressed twice; rebuild the image: %w", fault.Invalid), c.archive.Close())
	}
	c.Reader = headers.NewReader(from, c.check, nil)
	return c, nil
}

// again implements readable.
func (c *counted) again() (io.ReadCloser, error) {
	var diff io.Reader
	var err error
	switch d := c.diff.(type) {
	case readable:
		diff, err = d.again()
	case io.ReadSeeker: // of the library's copies
		_, err = d.Seek(0, io.SeekStart)
		diff = d
	default:
		err = errors.ErrUnsupported
	}
	if err != nil {
		return nil, err
	}
	return newCounted(diff, c.before)
}

// Close ends the decompression.
func (c *counted) Close() error {
	err := c.archive.Close()
	if again, is := c.diff.(*content); is && again.second {
		err = errors.Join(err, again.Close())
	}
	return err
}

type counter int64

// Write implements io.Writer.
func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

// Read implements io.Reader.
func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	if c.refused == nil && errors.Is(err, headers.ErrInvalid) {
		c.refused = fmt.Errorf("it is no tar archive that can be unpacked: %w; rebuild the image: %w", err, fault.Invalid)
	}
	return n, err
}

// check counts an entry.
func (c *counted) check(e *headers.Entry) error {
	c.refused = c.count(e)
	return c.refused
}

func (c *counted) count(e *headers.Entry) error {
	if e.Typeflag == tar.TypeDir {
		c.directories++
	}
	c.files += 1 + implied(c.last, e.Name)
	c.last = e.Name
	if c.files > maxFiles || c.directories > maxDirectories {
		return fmt.Errorf("with it the image has more than %d files and directories, or %d directories; split the image: %w", maxFiles, maxDirectories, fault.Invalid)
	}
	for _, path := range []string{e.Name, e.Linkname} {
		if depth(path) > MaxDepth {
			return fmt.Errorf("it has a path of more than %d directories, %.100q...; rebuild the image without it: %w", MaxDepth, path, fault.Invalid)
		}
	}
	if !few(c.uids, e.Uid) || !few(c.gids, e.Gid) {
		return fmt.Errorf("its files have more than %d owners or groups; rebuild the image with fewer: %w", maxOwners, fault.Invalid)
	}
	return c.punch(e.Holes)
}

// punch counts holes of a sparse file.
func (c *counted) punch(holes int64) error {
	if holes > smallHoles-c.holes {
		blob, err := c.size()
		if err != nil {
			return err
		}
		if most := max(smallHoles, (c.blobs+blob)*holesPerByte); holes > most-c.holes {
			return fmt.Errorf("with it the holes of the image's sparse files have more than %d bytes; rebuild the image with fewer: %w", most, fault.Invalid)
		}
	}
	c.holes += holes
	return nil
}

// size returns the bytes of the compressed layer, after all of them have come.
func (c *counted) size() (int64, error) {
	switch d := c.diff.(type) {
	case *content:
		return d.layer.blob.whole()
	case *os.File: // of the library's copies
		st, err := d.Stat()
		if err != nil {
			return 0, err
		}
		return st.Size(), nil
	}
	return 0, nil
}

// depth returns how many directories are above the last part of a path.
func depth(path string) int { return strings.Count(strings.Trim(path, "/"), "/") }

// implied returns how many directories above an entry are neither above the previous entry nor that
// entry. If they do not exist, the unpacker makes them.
func implied(before, name string) int {
	before, name = strings.Trim(before, "/")+"/", strings.Trim(name, "/")
	shared := 0
	for i := 0; i < min(len(name), len(before)) && name[i] == before[i]; i++ {
		if name[i] == '/' {
			shared++
		}
	}
	return depth(name) - shared
}

// few adds an id, and reports whether the ids are still few.
func few(all map[uint32]struct{}, id int) bool {
	all[uint32(id)] = struct{}{}
	return len(all) <= maxOwners
}
