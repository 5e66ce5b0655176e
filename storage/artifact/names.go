package artifact

import (
	"context"
	"errors"

	cstorage "go.podman.io/storage"
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
