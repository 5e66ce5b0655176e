package layers

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	drivers "go.podman.io/storage/drivers"

	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/unpack/extract"
)

// Record is what a layer's record says about the archive that it was made from.
type Record struct {
	Blob    digest.Digest // compressed; digest.Canonical
	Size    int64         // of the blob, in bytes
	Content digest.Digest // uncompressed; digest.Canonical
}

// Unpacker unpacks the layers of one image for a store: several side by side, each without the layer
// below it, and adds them in their order by the library's interface for staged layers. What layers
// contain stays within bounds.
type Unpacker struct {
	store cstorage.Store
	dir   string // for tar-split data of layers that are not added yet
	below stack  // the layer that was added last
	image image
	*repeats
}

// NewUnpacker returns an unpacker for one image, with a directory for files that are moved into the
// store. Layers that repeat others may unpack to room bytes in any case.
func NewUnpacker(store cstorage.Store, dir string, room int64) *Unpacker {
	return &Unpacker{
		store: store, dir: dir, below: stack{store: store},
		image: image{lookups: extract.MaxLookups}, repeats: newRepeats(room),
	}
}

// Stage implements Target.
func (u *Unpacker) Stage(ctx context.Context, content io.Reader, blobs func() (int64, error)) (Staged, error) {
	s := &staged{unpacker: u, counted: newCounted(&u.image, blobs)}
	if err := s.stage(ctx, content); err != nil {
		return nil, errors.Join(err, s.Drop())
	}
	return s, nil
}

// staged is a layer that has been unpacked beside the store.
type staged struct {
	unpacker *Unpacker
	counted  *counted
	result   extract.Result
	files    diskusage.Usage
	split    string // file with the compressed tar-split data; empty: there is none yet
	dir      *stagingDir
	out      drivers.DriverWithDifferOutput // for the library, which moves the files
	added    bool
}

// stage unpacks the content into a staging directory.
func (s *staged) stage(ctx context.Context, content io.Reader) (err error) {
	if s.dir, err = newStagingDir(s.unpacker.store); err != nil {
		return err
	}
	err = s.dir.swept(s.extractFrom(ctx, content, s.dir.files(), ignoresChown(s.unpacker.store)))
	if err == nil {
		s.files, err = diskusage.Of(nil, s.dir.files())
	}
	mode := os.FileMode(0) // the library must not set it, as Add does
	s.out = drivers.DriverWithDifferOutput{Target: s.dir.files(), Size: s.result.Size, RootDirMode: &mode}
	s.out.UIDs, s.out.GIDs = s.counted.recorded()
	return err
}

// extractFrom makes the files of the layer in a directory, and the file with its tar-split data.
func (s *staged) extractFrom(ctx context.Context, content io.Reader, dir string, ignoreChown bool) error {
	root, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	split, err := os.CreateTemp(s.unpacker.dir, "tar-split-")
	if err != nil {
		return err
	}
	s.split = split.Name()
	// Other levels have tables of half a mebibyte, which for a small layer cost more than all else, and save a sixth.
	compressed, _ := gzip.NewWriterLevel(split, gzip.StatelessCompression) // fails for unknown levels
	s.result, err = extract.Layer(ctx, extract.Order{Content: content, Dir: root, Split: compressed, Check: s.counted, IgnoreChown: ignoreChown})
	return errors.Join(err, compressed.Close(), split.Close())
}
