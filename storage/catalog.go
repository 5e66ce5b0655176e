package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/durable"
)

// catalog is the list of images. It reads the records of containers/storage when their files have
// changed, and parses an image only if its record has changed.
type catalog struct {
	store  cstorage.Store
	locks  *durable.Locks
	usage  *imageUsage
	pinned func(*Image) bool

	mu      sync.Mutex
	entries map[string]entry
	limit   int // bytes of configs that are kept
	files   []string
	stamps  []stamp // of files, before entries were read; nil: they must be read again
	sized   int     // of all entries whose size is an estimate; negative: there is none
}

// entry is a record of containers/storage with the image that it describes.
type entry struct {
	record cstorage.Image
	image  *Image // nil: unusable
	lost   bool   // unusable because layers are missing
	stale  bool   // layers may be missing since the record was read
	kept   int    // bytes of the image's config
	sized  int    // layers that had been measured when the image's size was an estimate; negative: it is none
}

func newCatalog(store cstorage.Store, locks *durable.Locks, usage *imageUsage, pinned func(*Image) bool) *catalog {
	return &catalog{
		store: store, locks: locks, usage: usage, pinned: pinned,
		entries: map[string]entry{}, limit: maxKeptSum, files: durable.ImageFiles(store),
	}
}

// list returns the images by id, without those that cannot be started because layers are missing or
// the config is invalid.
func (c *catalog) list(ctx context.Context) ([]*Image, error) {
	entries, err := c.refresh(ctx)
	if err != nil {
		return nil, err
	}
	return startable(entries), nil
}

// startable returns the images of entries that can be started, by id.
func startable(entries map[string]entry) []*Image {
	var images []*Image
	for _, e := range entries {
		if e.image != nil {
			images = append(images, e.image)
		}
	}
	slices.SortFunc(images, func(a, b *Image) int { return strings.Compare(a.ID, b.ID) })
	return images
}

// find returns an image that is in the store now, without using cached records; nil if there is
// none.
func (c *catalog) find(ctx context.Context, id string) (*Image, error) {
	entries, err := c.reread(ctx)
	if err != nil {
		return nil, err
	}
	return byID(startable(entries), id), nil
}

// lost returns the ids of images in the store that have lost layers, without using cached records.
func (c *catalog) lost(ctx context.Context) ([]string, error) {
	entries, err := c.reread(ctx)
	if err != nil {
		return nil, err
	}
	var ids []string
	for id, e := range entries {
		if e.lost {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// refresh returns the entries of all images; the map is never changed again. If no record has changed
// it opens no file. While another process writes records, it returns the entries from before, so that
// nobody waits.
func (c *catalog) refresh(ctx context.Context) (map[string]entry, error) {
	if known, ok := c.current(); ok {
		return known, nil
	}
	if c.locks.Held(durable.ToRead) == nil {
		return c.read(ctx)
	}
	if known := c.known(); len(known) > 0 {
		return known, nil
	}
	return c.reread(ctx)
}

// current returns the entries if they are those that the records would give now.
func (c *catalog) current() (map[string]entry, bool) {
	measured := c.usage.measured()
	c.mu.Lock()
	entries, stamps, sized := c.entries, c.stamps, c.sized
	c.mu.Unlock()
	return entries, (sized < 0 || sized == measured) && unchanged(c.files, stamps)
}

// reread is refresh for callers that need the present records.
func (c *catalog) reread(ctx context.Context) (map[string]entry, error) {
	if err := c.locks.Await(ctx, durable.ToRead); err != nil {
		return nil, fmt.Errorf("read image records: %w", err)
	}
	return c.read(ctx)
}

// read reads the records. No other process may have locked them.
func (c *catalog) read(ctx context.Context) (map[string]entry, error) {
	stamps, _ := stampsOf(c.files)
	records, err := c.store.Images()
	if err != nil {
		return nil, fmt.Errorf("read image records: %w", err)
	}
	records = inAllStores(records)
	measured := c.usage.measured()
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.limit
	for _, e := range c.entries {
		left -= e.kept
	}
	entries, sized := make(map[string]entry, len(records)), -1
	for _, record := range records {
		known, ok := c.entries[record.ID]
		same := ok && !known.stale && sameRecord(&known.record, &record) && (known.sized < 0 || known.sized == measured)
		if !same || known.image == nil { // an unusable image may have been repaired
			var err error
			if known, err = c.entryOf(ctx, record, left); fault.DiskFull(err) {
				return nil, err // concerns all images: the library cannot delete an incomplete layer
			}
			if err != nil && !same {
				slog.WarnContext(ctx, "unusable image not listed", "image", record.ID, "err", err)
			}
			left -= known.kept
		}
		if known.image == nil || known.sized >= 0 && known.sized != measured {
			stamps = nil
		}
		sized = max(sized, known.sized)
		entries[record.ID] = known
	}
	if err := ctx.Err(); err != nil {
		return nil, err // without keeping what the end of ctx has spoiled
	}
	c.entries, c.stamps, c.sized = entries, stamps, sized
	return entries, nil
}

// inAllStores joins the records that several stores have of an image. Records of the imagestore
// come first, then those of the graph root and of read-only stores: of images with the same name,
// the first was pulled last. A record in the imagestore replaces the one in the graph root, which
// is older.
func inAllStores(records []cstorage.Image) []cstorage.Image {
	var all []cstorage.Image
	index, taken := map[string]int{}, map[string]bool{}
	for _, r := range records {
		i, known := index[r.ID]
		if known && !r.ReadOnly {
			continue
		}
		r.Names = slices.DeleteFunc(slices.Clone(r.Names), func(name string) bool { return taken[name] })
		for _, name := range r.Names {
			taken[name] = true
		}
		if !known {
			index[r.ID] = len(all)
			all = append(all, r)
			continue
		}
		first := &all[i]
		first.Names = append(first.Names, r.Names...)
		first.Digests = sorted(slices.Concat(first.Digests, r.Digests))
		first.ReadOnly = true // if it is removed, the read-only one remains
	}
	return all
}

// hasName reports whether an image had this name when the records were read last.
func (c *catalog) hasName(name string) bool {
	for _, e := range c.known() {
		if slices.Contains(e.record.Names, name) {
			return true
		}
	}
	return false
}

func (c *catalog) known() map[string]entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entries
}

// entryOf makes the entry of a record and keeps up to left bytes of its config.
func (c *catalog) entryOf(ctx context.Context, record cstorage.Image, left int) (entry, error) {
	measured := c.usage.measured()
	image, estimated, err := c.load(ctx, &record)
	if err != nil {
		return entry{record: record, lost: errors.Is(err, durable.ErrLayersLost)}, err
	}
	image.ReadOnly = record.ReadOnly
	image.Pinned = c.pinned(image) || image.ReadOnly // nobody can remove it
	if !estimated {
		measured = -1
	}
	return entry{record: record, image: image, kept: image.trim(left), sized: measured}, nil
}

// forget makes the next list read an image again.
func (c *catalog) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entries := maps.Clone(c.entries) // readers have the former map
	delete(entries, id)
	c.entries, c.stamps = entries, nil
}

// recheck makes the next list look at the layers of all images again.
func (c *catalog) recheck() {
	c.mu.Lock()
	defer c.mu.Unlock()
	entries := maps.Clone(c.entries)
	for id, e := range entries {
		e.stale = true
		entries[id] = e
	}
	c.entries, c.stamps = entries, nil
}

// sameRecord compares the parts of records from which an Image is made.
func sameRecord(a, b *cstorage.Image) bool {
	return a.TopLayer == b.TopLayer && a.ReadOnly == b.ReadOnly &&
		slices.Equal(a.Names, b.Names) &&
		slices.Equal(a.NamesHistory, b.NamesHistory) &&
		slices.Equal(a.Digests, b.Digests) &&
		maps.Equal(a.BigDataDigests, b.BigDataDigests)
}

// sorted sorts names and removes duplicates.
func sorted[T ~string](names []T) []T {
	slices.Sort(names)
	return slices.Compact(names)
}
