package artifact

import (
	"fmt"

	"github.com/crius-run/crius/internal/fault"
)

// Images and artifacts share one space of ids: the same JSON document can be the config of an image
// and the manifest of an artifact. With such a document containers would get the files of one
// instead of the other, so the store accepts only one of the two.

// Reserve prevents artifacts from taking an id until release, while an image with that id is
// pulled. If an artifact has the id, the error is fault.Invalid.
func (s *Store) Reserve(id string) (release func(), err error) {
	s.writing.Lock() // an artifact that is being stored now has the id, or will find it reserved
	defer s.writing.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.artifacts[id] != nil || s.unusable[id] != nil || s.former.has(id) || s.additional.find(id) != nil {
		return nil, fmt.Errorf("the store has an OCI artifact with the image id %s; remove that first: %w", id, fault.Invalid)
	}
	s.reserved[id]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.reserved[id]--; s.reserved[id] == 0 {
			delete(s.reserved, id)
		}
	}, nil
}

// free returns an error if an image with the id is stored or being pulled.
func (s *Store) free(id string) error {
	s.mu.Lock()
	taken := s.reserved[id] > 0
	s.mu.Unlock()
	var err error
	if !taken {
		taken, err = s.cfg.IsImage(id)
	}
	if err == nil && taken {
		err = fmt.Errorf("the store has an image with the artifact's id %s; remove that first: %w", id, fault.Invalid)
	}
	return err
}
