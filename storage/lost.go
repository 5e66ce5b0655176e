package storage

import (
	"context"
	"errors"
	"log/slog"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/durable"
)

// dropLost deletes the images that lost layers, so that the next pull does not build on the
// records of those layers. An image that was made on this machine is left to a person.
func (s *Store) dropLost(ctx context.Context) error {
	lost, err := s.images.lost(ctx)
	if err != nil {
		return err
	}
	for _, id := range lost {
		if err := s.dropIfLost(ctx, id); err != nil {
			slog.WarnContext(ctx, "cannot delete image with missing layers", "image", id, "err", err)
		}
	}
	return nil
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
