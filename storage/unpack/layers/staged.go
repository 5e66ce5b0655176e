package layers

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	cstorage "go.podman.io/storage"
	drivers "go.podman.io/storage/drivers"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/flock"
)

// Add implements Staged.
//
// If somebody has added the layer meanwhile, the library would replace its files, on which
// containers may run, so only one worker at a time checks and adds.
func (s *staged) Add(id, parent string, as Record) error {
	store := s.unpacker.store
	turn, err := os.Open(filepath.Join(cmp.Or(store.ImageStore(), store.GraphRoot()), "overlay-layers"))
	if err != nil {
		return err
	}
	defer turn.Close()
	if err := flock.Wait(turn); err != nil {
		return err
	}
	if _, err := store.Layer(id); err == nil {
		return cstorage.ErrDuplicateID
	}
	if !s.result.Root {
		if err := s.takeRoot(parent); err != nil {
			return err
		}
	}
	if err := s.moveSplit(filepath.Join(store.GraphRoot(), "overlay-layers", id+".tar-split.gz")); err != nil {
		return err
	}
	s.out.UncompressedDigest, s.out.CompressedDigest = as.Content, as.Blob
	staging := filepath.Dir(s.out.Target)
	_, err = store.ApplyStagedLayer(cstorage.ApplyStagedLayerOptions{
		ID: id, ParentLayer: parent, DiffOutput: s.out, DiffOptions: &drivers.ApplyDiffWithDifferOpts{},
	})
	if err != nil {
		return err
	}
	s.added = true
	s.unpacker.added(as.Content, s.result.Size+s.counted.mine.holes) // the library does not count holes
	s.unpacker.unnoted[id] = as.Size
	return os.RemoveAll(staging) // which the library leaves empty
}

// Drop implements Staged.
func (s *staged) Drop() error {
	if s.added {
		return nil
	}
	s.counted.forget()
	if s.out == nil || s.out.Target == "" {
		return nil
	}
	return s.unpacker.store.CleanupStagedLayer(s.out)
}

// takeRoot gives the root directory of the layer, of which no entry says them, the owner and the
// permissions of the layer below, without the sticky bit and the like, as the library does.
func (s *staged) takeRoot(parent string) error {
	if parent == "" {
		return nil
	}
	driver, err := s.unpacker.store.GraphDriver()
	if err != nil {
		return err
	}
	metadata, err := driver.Metadata(parent)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	below, root := metadata["UpperDir"], s.out.Target
	if err := unix.Stat(below, &st); errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("layer %s: %w", parent, cstorage.ErrParentUnknown)
	} else if err != nil {
		return &os.PathError{Op: "stat", Path: below, Err: err}
	}
	if err := os.Chown(root, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Chmod(root, st.Mode&0o777); err != nil {
		return &os.PathError{Op: "chmod", Path: root, Err: err}
	}
	return nil
}

// moveSplit moves the tar-split data to where the library has those of a layer. Without a record
// the file means nothing. Given to the library, the data would be compressed while all layers are
// locked.
func (s *staged) moveSplit(to string) error {
	err := os.Rename(s.split, to)
	if !errors.Is(err, unix.EXDEV) {
		return err
	}
	from, err := os.Open(s.split) // layers are in an imagestore, with a file system of its own
	if err != nil {
		return err
	}
	defer from.Close()
	file, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, from)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}
