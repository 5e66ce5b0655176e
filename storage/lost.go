package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/durable"
)

// dropLost deletes the images that lost layers, so that the pull of an image with the given layers
// does not build on the records of lost ones. An image that was made on this machine is left to a
// person.
func (s *Store) dropLost(ctx context.Context, layers []string) error {
	gone, err := s.withoutFiles(layers)
	if err != nil {
		return err
	}
	if len(gone) > 0 { // since their images were looked at
		s.images.recheck()
	}
	lost, err := s.images.lost(ctx)
	if err != nil {
		return err
	}
	for _, id := range lost {
		if err := s.dropIfLost(ctx, id); err != nil {
			slog.WarnContext(ctx, "cannot delete image with missing layers", "image", id, "err", err)
		}
	}
	if len(gone) > 0 {
		gone, err = s.withoutFiles(layers)
	}
	if err != nil || len(gone) == 0 {
		return err
	}
	return fmt.Errorf("the files of layer %s are gone, and something still uses it: remove the containers and images that crius check names, so that it can be unpacked again: %w", gone[0], fault.Precondition)
}

// withoutFiles returns those of the layers that have a record but no files.
func (s *Store) withoutFiles(layers []string) (gone []string, err error) {
	layers = slices.DeleteFunc(slices.Clone(layers), s.hasFiles)
	if len(layers) == 0 {
		return nil, nil
	}
	records, err := s.store.Layers()
	for _, record := range records {
		if slices.Contains(layers, record.ID) && !record.ReadOnly && !s.hasFiles(record.ID) { // it may have come meanwhile
			gone = append(gone, record.ID)
		}
	}
	return gone, err
}

// hasFiles reports whether a layer has a directory with its files.
func (s *Store) hasFiles(layer string) bool {
	return slices.ContainsFunc(s.roots.All(), func(root string) bool {
		return !isGone(filepath.Join(root, driverName, layer, "diff"))
	})
}

func (s *Store) dropIfLost(ctx context.Context, id string) error {
	record, err := s.store.Image(id)
	if errors.Is(err, cstorage.ErrImageUnknown) {
		return nil
	}
	if err != nil {
		return err
	}
	if record.ReadOnly || !durable.FromRegistry(record) {
		return nil
	}
	if err := durable.ImageUsable(s.store, id); !errors.Is(err, durable.ErrLayersLost) {
		return err // nil: the layers are there again
	}
	if err := s.holds.expire(ctx, id); err != nil {
		return err
	}
	s.leftovers.Removals.Add(1)
	err = trace.Call(ctx, "delete image", func() error { return durable.DeleteImage(s.store, id) })
	if err == nil {
		s.images.forget(id)
		slog.WarnContext(ctx, "image with missing layers deleted; it will be pulled again when needed", "image", id)
	}
	return err
}
