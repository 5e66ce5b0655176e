package layers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/unpack/extract"
)

// Drop implements Staged.
func (s *staged) Drop() error {
	if s.added {
		return nil
	}
	s.counted.forget()
	if s.split != "" {
		_ = os.Remove(s.split) // if it stays, it goes with its directory
	}
	if s.dir == nil {
		return nil
	}
	return s.dir.delete()
}

// inherit gives the directories that no entry of the layer describes the attributes that they have in
// the layers below. Until the layer is added nobody sees it, and it is synced with the rest.
func (s *staged) inherit(ctx context.Context, parent string, below *stack) error {
	if parent == "" || len(s.result.Implied) == 0 {
		return nil
	}
	dirs, err := below.of(parent)
	if err != nil {
		return err
	}
	err = s.result.Implied.Inherit(ctx, s.out.Target, dirs, &s.unpacker.image.lookups)
	if errors.Is(err, extract.ErrBelowMissing) {
		return fmt.Errorf("layer %s: %w: %w", parent, err, cstorage.ErrParentUnknown)
	}
	return err
}

// stack is a layer with the directories of it and of all layers below it, from the top. The library looks at each of
// them to say where they are, so it is asked once.
type stack struct {
	store cstorage.Store
	top   string
	dirs  []string
	rest  string // the highest layer whose directories dirs lacks; empty: there is none
}

// of returns the directories of a layer and of those below it.
func (s *stack) of(layer string) ([]string, error) {
	if s.top != layer {
		s.top, s.dirs, s.rest = layer, nil, layer
	}
	if s.rest == "" {
		return s.dirs, nil
	}
	driver, err := s.store.GraphDriver()
	if err != nil {
		return nil, err
	}
	metadata, err := driver.Metadata(s.rest)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("layer %s: %w", s.rest, cstorage.ErrParentUnknown)
	}
	if err != nil {
		return nil, err
	}
	s.dirs = append(s.dirs, metadata["UpperDir"])
	if lower := metadata["LowerDir"]; lower != "" {
		s.dirs = append(s.dirs, strings.Split(lower, ":")...) // overlay takes no colon in a directory either
	}
	s.rest = ""
	return s.dirs, nil
}

// grow notes a layer that was added above another, which may be none. It does not look at that one: perhaps nobody
// will ask.
func (s *stack) grow(parent, layer, dir string) {
	if parent == "" || s.top != parent {
		s.dirs, s.rest = nil, parent
	}
	s.top, s.dirs = layer, slices.Insert(s.dirs, 0, dir)
}

// moveSplit moves the tar-split data to where the library has those of a layer. Without a record
// the file means nothing. Given to the library, the data would be compressed while all layers are
// locked. The library syncs the file system of the records before it completes that of the layer.
func (s *staged) moveSplit(to string) error {
	if s.unpacker.store.ImageStore() == "" { // layers and their tar-split data are in one file system
		if err := os.Rename(s.split, to); !errors.Is(err, unix.EXDEV) {
			return err
		}
	}
	from, err := os.Open(s.split)
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
	return errors.Join(err, file.Close(), os.Remove(s.split))
}
