package layers

import (
	"archive/tar"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/extract"
)

// Limits of layers. Each is far above any known image: the largest images may have a million or two
// files, no path of a hundred directories, and a few thousand owners.
const (
	maxFiles       = 4_000_000 // entries of all layers of an image, and directories implied by their names
	maxDirectories = 1_000_000 // the unpacker remembers each until the end of the layer
	maxOwners      = 65_536    // uids, and gids, of a layer; a pod's user namespace has as many
)

// Limits of the holes in sparse files of an image's layers in total. Holes become zeros on the
// disk. gzip could not have packed more zeros into the layers.
const (
	holesPerByte = 1032
	smallHoles   = 256 << 20 // bytes, allowed in any case
)

// totals are sums over layers.
type totals struct {
	files       int
	directories int   // of files
	holes       int64 // bytes of sparse files that are holes
}

// image bounds the layers of one image, which may be unpacked side by side: more files, deeper
// directories, more owners and more bytes of sparse files than any image needs are refused with
// fault.Invalid before they are made.
type image struct {
	mu sync.Mutex
	totals
	lookups int // of implied directories in lower layers, that are left; only Add looks
}

// add counts what a layer has, less if the numbers are negative, and returns the sums.
func (i *image) add(t totals) totals {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.files += t.files
	i.directories += t.directories
	i.holes += t.holes
	return i.totals
}

// counted counts a layer of an image. It implements extract.Check.
type counted struct {
	image *image
	// blobs returns the bytes of the blobs of the image up to this layer's, once they have come.
	blobs func() (int64, error)

	mine       totals
	last       string // name of the previous entry
	uids, gids owners
}

func newCounted(of *image, blobs func() (int64, error)) *counted {
	return &counted{image: of, blobs: blobs, uids: newOwners(), gids: newOwners()}
}

// forget makes the layer count no longer.
func (c *counted) forget() {
	c.image.add(totals{-c.mine.files, -c.mine.directories, -c.mine.holes})
	c.mine = totals{}
}

// add counts a part of the layer.
func (c *counted) add(t totals) (sums totals) {
	c.mine.files += t.files
	c.mine.directories += t.directories
	c.mine.holes += t.holes
	return c.image.add(t)
}

// Entry implements extract.Check.
func (c *counted) Entry(h *tar.Header) error {
	more := totals{files: 1 + implied(c.last, h.Name)}
	if h.Typeflag == tar.TypeDir {
		more.directories = 1
	}
	c.last = h.Name
	if err := c.bound(c.add(more)); err != nil {
		return err
	}
	for _, path := range []string{h.Name, h.Linkname} {
		if depth(path) > extract.MaxDepth {
			return fmt.Errorf("it has a path of more than %d directories, %.100q...; rebuild the image without it: %w", extract.MaxDepth, path, fault.Invalid)
		}
	}
	whiteout := strings.HasPrefix(path.Base(h.Name), ".wh.")
	if !c.uids.add(h.Uid, whiteout) || !c.gids.add(h.Gid, whiteout) {
		return fmt.Errorf("its files have more than %d owners or groups; rebuild the image with fewer: %w", maxOwners, fault.Invalid)
	}
	return nil
}

// Implied implements extract.Check. Entry has counted such directories as files.
func (c *counted) Implied(count int) error { return c.bound(c.add(totals{directories: count})) }

// bound refuses an image with too many files or directories.
func (c *counted) bound(sums totals) error {
	if sums.files > maxFiles || sums.directories > maxDirectories {
		return fmt.Errorf("with it the image has more than %d files and directories, or %d directories; split the image: %w", maxFiles, maxDirectories, fault.Invalid)
	}
	return nil
}

// Holes implements extract.Check.
func (c *counted) Holes(bytes int64) error {
	holes := c.add(totals{holes: bytes}).holes
	if holes <= smallHoles {
		return nil
	}
	blobs, err := c.blobs()
	if err != nil {
		return err
	}
	if most := max(smallHoles, blobs*holesPerByte); holes > most {
		return fmt.Errorf("with it the holes of the image's sparse files have more than %d bytes; rebuild the image with fewer: %w", most, fault.Invalid)
	}
	return nil
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

// KeptOwners is how many uids and gids a layer's record may list. Real layers have few, which take less
// space than the rest of the record: they stay, so the file need not be written again, and podman finds
// its lists. See package idlists.
const KeptOwners = 8

// owners are the uids or the gids in a layer.
type owners struct {
	all   map[uint32]struct{}
	files map[uint32]struct{} // of what is no whiteout; more than KeptOwners are not kept
}

func newOwners() owners { return owners{map[uint32]struct{}{}, map[uint32]struct{}{}} }

// add adds an id, and reports whether the ids are still few.
func (o owners) add(id int, whiteout bool) bool {
	o.all[uint32(id)] = struct{}{}
	if !whiteout && len(o.files) <= KeptOwners {
		o.files[uint32(id)] = struct{}{}
	}
	return len(o.all) <= maxOwners
}

// list returns the ids for the layer's record.
func (o owners) list() []uint32 {
	ids := make([]uint32, 0, len(o.files))
	for id := range o.files {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// recorded returns the owners that the layer's record lists: none if there are many.
func (c *counted) recorded() (uids, gids []uint32) {
	uids, gids = c.uids.list(), c.gids.list()
	if len(uids) > KeptOwners || len(gids) > KeptOwners {
		return nil, nil
	}
	return uids, gids
}
