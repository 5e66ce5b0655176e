package layers

import (
	"bufio"
	"cmp"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/vbatts/tar-split/tar/asm"
	tarsplit "github.com/vbatts/tar-split/tar/storage"
	cstorage "go.podman.io/storage"
	drivers "go.podman.io/storage/drivers"
	"go.podman.io/storage/pkg/archive"
	"go.podman.io/storage/pkg/chrootarchive"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/flock"
)

// AnyName returns a store whose PutLayer accepts directories with any name. The library measures a
// layer that it has unpacked by a walk that fails for names that are not UTF-8. AnyName unpacks
// such a layer once more, by the library's interface for staged layers, which leaves measuring to
// the caller. Its temporary files are in dir.
func AnyName(store cstorage.Store, dir string) cstorage.Store { return &anyName{store, dir} }

type anyName struct {
	cstorage.Store
	dir string
}

// readable is the archive of a layer that can be read again from its beginning.
type readable interface {
	again() (io.ReadCloser, error)
}

// PutLayer implements cstorage.Store.
func (s *anyName) PutLayer(id, parent string, names []string, mountLabel string, writeable bool, options *cstorage.LayerOptions, diff io.Reader) (*cstorage.Layer, int64, error) {
	layer, size, err := s.Store.PutLayer(id, parent, names, mountLabel, writeable, options, diff)
	from, can := diff.(readable)
	if !errors.Is(err, fs.ErrInvalid) || !can || options == nil {
		return layer, size, err
	}
	archive, err := from.again()
	if err != nil {
		return nil, -1, err
	}
	defer archive.Close()
	return s.stage(id, parent, options, archive)
}

// stage unpacks a layer and adds it.
func (s *anyName) stage(id, parent string, options *cstorage.LayerOptions, content io.Reader) (*cstorage.Layer, int64, error) {
	split, err := os.CreateTemp(s.dir, "tar-split-")
	if err != nil {
		return nil, -1, err
	}
	if err := os.Remove(split.Name()); err != nil {
		return nil, -1, errors.Join(err, split.Close())
	}
	below, err := s.directory(parent)
	if err != nil {
		return nil, -1, errors.Join(err, split.Close())
	}
	staged, err := s.PrepareStagedLayer(nil, &staging{content: content, split: split, below: below, options: options})
	if err != nil {
		if staged.Target != "" {
			staged.TarSplit = split
			err = errors.Join(err, s.CleanupStagedLayer(staged))
		}
		return nil, -1, err
	}
	return s.commit(id, parent, options, staged)
}

// directory returns the directory with the files of a layer, or "" for no layer.
func (s *anyName) directory(layer string) (string, error) {
	if layer == "" {
		return "", nil
	}
	driver, err := s.GraphDriver()
	if err != nil {
		return "", err
	}
	metadata, err := driver.Metadata(layer)
	return metadata["UpperDir"], err
}

// commit adds a layer that has been unpacked. If somebody has added the layer meanwhile, the
// library would replace its files, on which containers may run, so only one worker at a time checks
// and adds.
func (s *anyName) commit(id, parent string, options *cstorage.LayerOptions, staged *drivers.DriverWithDifferOutput) (*cstorage.Layer, int64, error) {
	turn, err := os.Open(filepath.Join(cmp.Or(s.ImageStore(), s.GraphRoot()), "overlay-layers"))
	if err == nil {
		defer turn.Close()
		err = flock.Wait(turn)
	}
	if _, lookErr := s.Layer(id); err == nil && lookErr == nil {
		err = cstorage.ErrDuplicateID
	}
	if err != nil {
		return nil, -1, errors.Join(err, s.CleanupStagedLayer(staged))
	}
	layer, err := s.ApplyStagedLayer(cstorage.ApplyStagedLayerOptions{
		ID: id, ParentLayer: parent, LayerOptions: options, DiffOutput: staged, DiffOptions: &drivers.ApplyDiffWithDifferOpts{},
	})
	return layer, staged.Size, err
}

// staging implements drivers.Differ, the library's interface for staged layers.
type staging struct {
	content io.Reader
	split   *os.File // gets the data from which the archive can be rebuilt
	below   string   // directory of the layer below; may be empty
	options *cstorage.LayerOptions
}

// Close implements drivers.Differ.
func (s *staging) Close() error { return nil }

// ApplyDiff implements drivers.Differ.
func (s *staging) ApplyDiff(dest string, options *archive.TarOptions, _ *drivers.DifferOptions) (drivers.DriverWithDifferOutput, error) {
	mode, err := takeRoot(dest, s.below)
	if err != nil {
		return drivers.DriverWithDifferOutput{}, err
	}
	var size counter
	split := bufio.NewWriterSize(s.split, 64<<10)
	payload, done, err := asm.NewInputTarStreamWithDone(io.TeeReader(s.content, &size), tarsplit.NewJSONPacker(split), tarsplit.NewDiscardFilePutter())
	if err != nil {
		return drivers.DriverWithDifferOutput{}, err
	}
	err = chrootarchive.UntarUncompressed(payload, dest, options)
	if err == nil {
		_, err = io.Copy(io.Discard, payload) // the padding
	}
	err = errors.Join(err, payload.Close())
	if doneErr := <-done; err == nil {
		err = doneErr
	}
	if err == nil {
		err = split.Flush()
	}
	return drivers.DriverWithDifferOutput{
		Size: int64(size), UncompressedDigest: s.options.UncompressedDigest, CompressedDigest: s.options.OriginalDigest,
		TarSplit: s.split, RootDirMode: &mode, // takeRoot has set it
	}, err
}

// takeRoot gives the root directory of a layer the owner and mode of the layer below, as the
// library does. They apply until the layer sets others.
func takeRoot(dir, below string) (fs.FileMode, error) {
	if below == "" {
		below = dir
	}
	var st unix.Stat_t
	if err := unix.Stat(below, &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: below, Err: err}
	}
	if err := os.Chown(dir, int(st.Uid), int(st.Gid)); err != nil {
		return 0, err
	}
	if err := unix.Chmod(dir, st.Mode&0o7777); err != nil {
		return 0, &os.PathError{Op: "chmod", Path: dir, Err: err}
	}
	return fs.FileMode(st.Mode & 0o777), nil
}
