package layers

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/archive"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/headers"
)

// What layers may have. Each number is far above that of any image that is known: the largest
// have half a million files, no path of a hundred directories, and some thousand owners.
const (
	maxFiles  = 1_000_000 // entries of all layers of an image
	maxDepth  = 256       // directories of a path: the time of each system call grows with them
	maxOwners = 65_536    // uids, and gids, of a layer; a user namespace of a pod has as many
)

// BoundFiles returns a store for the layers of one image, added one after the other. PutLayer
// refuses, with fault.Invalid, more files, deeper directories and more owners than any image
// needs, before there are more.
func BoundFiles(store cstorage.Store) cstorage.Store { return &fileStore{Store: store} }

type fileStore struct {
	cstorage.Store
	files int // of the layers that were added
}

// PutLayer implements cstorage.Store.
func (s *fileStore) PutLayer(id, parent string, names []string, mountLabel string, writeable bool, options *cstorage.LayerOptions, diff io.Reader) (*cstorage.Layer, int64, error) {
	if diff == nil {
		return s.Store.PutLayer(id, parent, names, mountLabel, writeable, options, diff)
	}
	c, err := newCounted(diff, s.files)
	if err != nil {
		return nil, -1, err
	}
	defer func() { _ = c.Close() }() // what was wrong with the blob Read has said
	if options != nil && options.OriginalSize == nil {
		with := *options
		with.OriginalSize = &c.blob // which the library looks at when it has read all
		options = &with
	}
	layer, size, err := s.Store.PutLayer(id, parent, names, mountLabel, writeable, options, c)
	if c.refused != nil { // the library has only the child's word for it
		return nil, -1, c.refused
	}
	if err == nil {
		s.files = c.files
	}
	return layer, size, err
}

// counted is the decompressed archive of a layer.
type counted struct {
	*headers.Reader
	diff       io.Reader // the layer as it comes
	before     int       // files of the image without it
	archive    io.ReadCloser
	blob       int64 // bytes that were read of it before they were decompressed
	files      int   // of the image, up to here
	uids, gids map[uint32]struct{}
	refused    error
}

// newCounted begins to read the layer of an image that has so many files without it.
func newCounted(diff io.Reader, files int) (*counted, error) {
	c := &counted{diff: diff, before: files, files: files, uids: map[uint32]struct{}{}, gids: map[uint32]struct{}{}}
	var err error
	if c.archive, err = archive.DecompressStream(io.TeeReader(diff, (*counter)(&c.blob))); err != nil {
		return nil, err
	}
	from := bufio.NewReaderSize(c.archive, 32<<10)
	first, _ := from.Peek(10) // what is wrong shows again
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
	if c.files++; c.files > maxFiles {
		return fmt.Errorf("with it the image has more than %d files and directories; split the image: %w", maxFiles, fault.Invalid)
	}
	for _, paths := range [][][]byte{e.Names, e.Links} {
		for _, path := range paths {
			if depth(path) > maxDepth {
				return fmt.Errorf("it has a path of more than %d directories, %.100q...; rebuild the image without it: %w", maxDepth, path, fault.Invalid)
			}
		}
	}
	if !few(c.uids, e.UIDs) || !few(c.gids, e.GIDs) {
		return fmt.Errorf("its files have more than %d owners or groups; rebuild the image with fewer: %w", maxOwners, fault.Invalid)
	}
	return nil
}

// depth is how many directories are above the last part of a path.
func depth(path []byte) int { return bytes.Count(bytes.Trim(path, "/"), []byte("/")) }

// few adds ids, and reports whether they are few.
func few(all map[uint32]struct{}, ids []int64) bool {
	for _, id := range ids {
		all[uint32(id)] = struct{}{}
	}
	return len(all) <= maxOwners
}
