package layers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/unpack/extract"
)

// Record is what a layer's record says about the archive that it was made from.
type Record struct {
	Blob    digest.Digest // compressed; digest.Canonical
	Size    int64         // of the blob, in bytes
	Content digest.Digest // uncompressed; digest.Canonical
}

// Store is the store for which layers are unpacked.
type Store interface {
	// Has reports whether the store has a layer.
	Has(id string) (bool, error)
	// Dirs returns the directories with the files of a layer and of those below it, from the top.
	Dirs(id string) ([]string, error)
	// Add adds layers, each above the one before it. It moves their files, and returns where those
	// are that the store has now, those that it had already included, and why it has not the next one.
	Add(layers []Unpacked) (added []Place, err error)
}

// Unpacked is a layer that has been unpacked beside the store, and its place there.
type Unpacked struct {
	ID, Parent string // an empty parent: it is the lowest layer
	Record     Record
	Dir        string // with its files; empty: the store has the layer
	Split      string // file with its tar-split data, compressed
	Size       int64  // of its content, in bytes
	UIDs, GIDs []uint32
	Usage      diskusage.Usage // of its files
}

// Staging is where the layers of one image are unpacked.
type Staging struct {
	Dir         string `json:"Dir"`         // for the files of layers; StagingLock in it is locked as long as it is in use
	Splits      string `json:"Splits"`      // directory for tar-split data
	IgnoreChown bool   `json:"IgnoreChown"` // see extract.Order
}

// FilesOf is the directory with the files of a layer with this name.
func (s Staging) FilesOf(name string) string { return filepath.Join(s.Dir, name) }

// SplitOf is the file with the tar-split data of a layer with this name.
func (s Staging) SplitOf(name string) string { return filepath.Join(s.Splits, "tar-split-"+name) }

// StagingLock is the name of a file in a staging directory.
const StagingLock = "staging.lock"

// swept returns the error of a layer that was unpacked into the directory. If another program has
// deleted the directory meanwhile, that is the error, whatever else may be wrong: see swept.
func (s Staging) swept(err error) error {
	_, gone := os.Lstat(filepath.Join(s.Dir, StagingLock))
	if !errors.Is(gone, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("another program that uses the image store has deleted the directory in which a layer was being unpacked (%v); retry the pull: %w", err, gone) //nolint:errorlint // it may only look like one of the image
}

// Unpacker unpacks the layers of one image for a store: several side by side, each without the layer
// below it, and has the store add them in their order. What layers contain stays within bounds.
type Unpacker struct {
	Store
	staging Staging
	begun   atomic.Int64 // layers
	below   stack        // the layer that was added last
	image   image
	*repeats
}

// NewUnpacker returns an unpacker for one image. Layers that repeat others may unpack to room bytes
// in any case.
func NewUnpacker(store Store, staging Staging, room int64) *Unpacker {
	return &Unpacker{
		Store: store, staging: staging, below: stack{store: store},
		image: image{lookups: extract.MaxLookups}, repeats: newRepeats(room),
	}
}

// Stage implements Target.
func (u *Unpacker) Stage(ctx context.Context, content io.Reader, blobs func() (int64, error)) (Staged, error) {
	name := strconv.FormatInt(u.begun.Add(1), 10)
	s := &staged{unpacker: u, counted: newCounted(&u.image, blobs), dir: u.staging.FilesOf(name), split: u.staging.SplitOf(name)}
	if err := u.staging.swept(s.stage(ctx, content)); err != nil {
		return nil, errors.Join(err, s.Drop())
	}
	return s, nil
}

// Add implements Target.
func (u *Unpacker) Add(ctx context.Context, layers []Addition) (added []Place, err error) {
	ready, failed := u.inherit(ctx, layers)
	if ready == 0 {
		return nil, failed
	}
	unpacked := make([]Unpacked, ready)
	for i, l := range layers[:ready] {
		unpacked[i] = Unpacked{ID: l.ID, Parent: l.Parent, Record: l.Record}
		if s, is := l.Staged.(*staged); is {
			s.describe(&unpacked[i])
		}
	}
	added, err = u.Store.Add(unpacked)
	for i, place := range added {
		u.below.grow(layers[i].Parent, layers[i].ID, place.Files)
		if s, is := layers[i].Staged.(*staged); is {
			s.result.Implied = nil
			u.added(layers[i].Record.Content, s.result.Size+s.counted.mine.holes) // the library does not count holes
			s.added = true
			_ = s.delete() // there is something left if another pull was faster
		}
	}
	if err != nil {
		return added, u.staging.swept(err)
	}
	return added, failed
}

// inherit gives the directories that no entry describes the attributes that they have in the layers below. It returns how
// many layers are ready to be added, and the error of the next one.
func (u *Unpacker) inherit(ctx context.Context, layers []Addition) (ready int, err error) {
	below := u.below.clone() // to which those are added that will move
	for i, l := range layers {
		s, is := l.Staged.(*staged)
		if !is {
			continue
		}
		if err := s.inherit(ctx, l.Parent, &below); err != nil {
			return i, err
		}
		below.grow(l.Parent, l.ID, s.dir)
	}
	return len(layers), nil
}

// staged is a layer that has been unpacked beside the store.
type staged struct {
	unpacker *Unpacker
	counted  *counted
	dir      string // with its files
	split    string // file with its tar-split data
	result   extract.Result
	usage    diskusage.Usage // of its files
	added    bool
}

// stage unpacks the content into the layer's directory.
func (s *staged) stage(ctx context.Context, content io.Reader) (err error) {
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		return err
	}
	if err := s.extractFrom(ctx, content); err != nil {
		return err
	}
	s.usage, err = diskusage.Of(nil, s.dir)
	return err
}

// extractFrom makes the files of the layer, and the file with its tar-split data.
func (s *staged) extractFrom(ctx context.Context, content io.Reader) error {
	root, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	defer root.Close()
	split, err := os.OpenFile(s.split, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	// Other levels have tables of half a mebibyte, which for a small layer cost more than all else, and save a sixth.
	compressed, _ := gzip.NewWriterLevel(split, gzip.StatelessCompression) // fails for unknown levels
	s.result, err = extract.Layer(ctx, extract.Order{Content: content, Dir: root, Split: compressed, Check: s.counted, IgnoreChown: s.unpacker.staging.IgnoreChown})
	return errors.Join(err, compressed.Close(), split.Close())
}

// describe tells the store of the layer.
func (s *staged) describe(u *Unpacked) {
	u.Dir, u.Split, u.Size, u.Usage = s.dir, s.split, s.result.Size, s.usage
	u.UIDs, u.GIDs = s.counted.recorded()
}
