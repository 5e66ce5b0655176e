package layers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/crius-run/crius/storage/unpack/extract"
)

// Drop implements Staged.
func (s *staged) Drop() error {
	if s.added {
		return nil
	}
	s.counted.forget()
	return s.delete()
}

// delete deletes what was unpacked and has not been moved.
func (s *staged) delete() error {
	_ = os.Remove(s.split) // if it stays, it goes with its directory
	return os.RemoveAll(s.dir)
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
	err = s.result.Implied.Inherit(ctx, s.dir, dirs, &s.unpacker.image.lookups)
	if errors.Is(err, extract.ErrBelowMissing) {
		return fmt.Errorf("layer %s: %w: %w", parent, err, ErrGone)
	}
	return err
}

// stack is a layer with the directories of it and of all layers below it, from the top. The store looks at each of
// them to say where they are, so it is asked once.
type stack struct {
	store Store
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
	dirs, err := s.store.Dirs(s.rest)
	if err != nil {
		return nil, err
	}
	s.dirs, s.rest = append(s.dirs, dirs...), ""
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

// clone returns a copy that grows by itself.
func (s *stack) clone() stack {
	c := *s
	c.dirs = slices.Clone(s.dirs)
	return c
}
