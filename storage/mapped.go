package storage

import (
	"fmt"
	"path/filepath"

	"github.com/crius-run/crius/storage/overlay"
)

// CheckMapping says why root file systems cannot have the owners that the user namespace at path
// gives them: the kernel or the file system of the store lacks ID-mapped mounts, which is
// fault.Unimplemented. It changes nothing.
func (s *Store) CheckMapping(path string) error {
	root := s.roots.ForImages() // any two directories
	if err := overlay.CheckMapping(path, [2]string{filepath.Join(root, driverName), filepath.Join(root, driverName+"-images")}); err != nil {
		return fmt.Errorf("root file systems in user namespaces: %w", err)
	}
	return nil
}
