package artifact

import (
	"fmt"

	"github.com/crius-run/crius/internal/fault"
)

// Images and artifacts share one space of ids: one JSON document can be both the config of
// an image and the manifest of an artifact. Whoever made such a document would give
// containers the files of one for the other, so the store takes only one of the two.

// Reserve keeps artifacts from taking an id until release, while an image of that id is
// pulled. The error is fault.Invalid if an artifact has it.
func (s *Store) Reserve(id string) (release func(), err error) {
	s.writing.Lock() // an artifact that is getting its place has it, or will find the id reserved
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

// free refuses the id of an image that is stored or being pulled.
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
