package foreign

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Bounds of a foreign configuration, far above those that are real.
const (
	maxFile  = 1 << 20 // bytes of one file
	maxFiles = 256
)

// reader reads the files of one configuration.
type reader struct{ files []string }

// read reads one file, and notes it.
func (r *reader) read(path string) (*table, error) {
	if len(r.files) == maxFiles {
		return nil, fmt.Errorf("more than %d files: %w", maxFiles, fault.Invalid)
	}
	data, err := regular.Read(path, maxFile)
	if err != nil {
		return nil, err
	}
	r.files = append(r.files, path)
	return parse(path, data)
}

// below lists the files in dir and all directories below it, in lexical order, as
// CRI-O does: whatever their names are. A directory that is missing has none.
func below(dir string) ([]string, error) {
	var files []string
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case path == dir && errors.Is(err, fs.ErrNotExist):
			return fs.SkipAll
		case err != nil:
			return err
		case entry.IsDir():
			return nil
		}
		if files = append(files, path); len(files) > maxFiles {
			return fmt.Errorf("%s has more than %d files: %w", dir, maxFiles, fault.Invalid)
		}
		return nil
	})
	return files, err
}
