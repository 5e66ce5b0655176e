package layers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	drivers "go.podman.io/storage/drivers"
	"go.podman.io/storage/pkg/archive"

	"github.com/crius-run/crius/storage/diskusage"
	"github.com/crius-run/crius/storage/unpack/extract"
)

// Record is what a layer's record says about the archive that it was made from.
type Record struct {
	Blob    digest.Digest // compressed; digest.Canonical
	Size    int64         // of the blob, in bytes
	Content digest.Digest // uncompressed; digest.Canonical
}

// Unpacker unpacks the layers of one image for a store, by the library's interface for staged
// layers: several side by side, each without the layer below it, and adds them in their order.
// What layers contain stays within bounds.
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
	s.extract = func(dir string, ignoreChown bool) error { return s.extractFrom(ctx, content, dir, ignoreChown) }
	out, err := u.store.PrepareStagedLayer(nil, s)
	s.out = out
	if err != nil {
		return nil, errors.Join(err, s.Drop())
	}
	return s, nil
}

// staged is a layer that has been unpacked beside the store. It implements drivers.Differ, by which
// the library has it unpacked.
type staged struct {
	unpacker *Unpacker
	counted  *counted
	extract  func(dir string, ignoreChown bool) error
	result   extract.Result
	files    diskusage.Usage
	split    string // file with the compressed tar-split data; empty: there is none yet
	out      *drivers.DriverWithDifferOutput
	added    bool
}

// Close implements drivers.Differ.
func (s *staged) Close() error { return nil }

// ApplyDiff implements drivers.Differ.
func (s *staged) ApplyDiff(dest string, options *archive.TarOptions, staging *drivers.DifferOptions) (drivers.DriverWithDifferOutput, error) {
	if options.WhiteoutFormat != archive.OverlayWhiteoutFormat || options.ForceMask != nil || staging.Format != drivers.DifferOutputFormatDir {
		return drivers.DriverWithDifferOutput{}, errors.ErrUnsupported // crius refuses such a configuration
	}
	err := s.extract(dest, options.IgnoreChownErrors)
	err = sweptMeanwhile(staging.StagingDirectory, err)
	s.extract = nil // and all that it needs
	if err == nil {
		s.files, err = diskusage.Of(nil, dest)
	}
	mode := os.FileMode(0) // the library must not set it, as Add does
	out := drivers.DriverWithDifferOutput{Size: s.result.Size, RootDirMode: &mode}
	out.UIDs, out.GIDs = s.counted.recorded()
	return out, err
}

// sweptMeanwhile returns the error of a layer that was unpacked into a directory. If another program
// has deleted files of it meanwhile, that is the error, whatever else may be wrong: see swept.
func sweptMeanwhile(dir string, err error) error {
	_, gone := os.Lstat(filepath.Join(dir, "staging.lock"))
	if !errors.Is(gone, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("another program that uses the image store has deleted the directory in which a layer was being unpacked (%v); retry the pull: %w", err, gone) //nolint:errorlint // it may only look like one of the image
}

// compressors compress tar-split data, and have large tables.
var compressors = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // fails for unknown levels
	return w
}}

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
	compressed := compressors.Get().(*gzip.Writer)
	defer compressors.Put(compressed)
	compressed.Reset(split)
	s.result, err = extract.Layer(ctx, extract.Order{Content: content, Dir: root, Split: compressed, Check: s.counted, IgnoreChown: ignoreChown})
	return errors.Join(err, compressed.Close(), split.Close())
}
