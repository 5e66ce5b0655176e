package artifact

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

// HasImage reports whether a store has an image with an id.
func HasImage(images cstorage.Store, id string) (bool, error) {
	_, err := images.Image(id)
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return false, nil
	}
	return err == nil, err
}

// TakeName removes a name, which now means an artifact, from the image that had it. taken reports
// whether there was one.
func TakeName(images cstorage.Store, name string) (taken bool, err error) {
	record, err := images.Image(name)
	if errors.Is(err, cstorage.ErrImageUnknown) || err == nil && record.ReadOnly {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, images.RemoveNames(record.ID, []string{name})
}

// HasName reports whether an artifact in this store has a name.
func (s *Store) HasName(name string) bool {
	return slices.ContainsFunc(s.own(), func(a *Artifact) bool { return slices.Contains(a.Names, name) })
}

// WithDigest returns the artifact in this store that a digest means, or nil: one with this manifest,
// or an index or reference with this digest has led to it.
func (s *Store) WithDigest(d digest.Digest) *Artifact {
	for _, a := range s.own() {
		if slices.Contains(a.Digests, d) || slices.ContainsFunc(a.Refs, func(ref string) bool { return strings.HasSuffix(ref, "@"+d.String()) }) {
			return a
		}
	}
	return nil
}

// NoteRef adds a reference to Record.Refs of an artifact. If it has been removed, the error is
// fault.NotFound.
func (s *Store) NoteRef(ctx context.Context, id, ref string) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	a := s.find(id)
	if a == nil {
		return fmt.Errorf("artifact %s is not in the store, pull it again: %w", id, fault.NotFound)
	}
	record := a.withRef(ref)
	if a.same(record) {
		return nil
	}
	if err := s.crowded(&Artifact{ID: id, Files: a.Files, Annotations: a.Annotations, Record: record}); err != nil {
		return err
	}
	return s.change(ctx, a, record, nil)
}

// List returns the artifacts in this store, sorted by id.
func (s *Store) List() []*Artifact {
	return slices.SortedFunc(slices.Values(s.own()), func(a, b *Artifact) int { return strings.Compare(a.ID, b.ID) })
}

// SettleNames removes names that an image and an artifact share after a crash from both: nobody
// knows which of them was pulled last. The next pull gives the name to one of them.
func (s *Store) SettleNames(ctx context.Context, images cstorage.Store) error {
	records, err := images.Images()
	if err != nil {
		return err
	}
	named := map[string]bool{}
	for _, a := range s.own() {
		for _, name := range a.Names {
			named[name] = true
		}
	}
	var errs []error
	for _, record := range records {
		for _, name := range record.Names {
			if named[name] && !record.ReadOnly {
				errs = append(errs, images.RemoveNames(record.ID, []string{name}), s.Unname(ctx, name))
			}
		}
	}
	return errors.Join(errs...)
}
