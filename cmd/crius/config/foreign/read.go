package foreign

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/regular"
)

// Bounds of a foreign configuration, far above real ones.
const (
	maxFile  = 1 << 20 // bytes of one file
	maxFiles = 256
)

// absentError says that there is no configuration, and what was looked for.
type absentError struct {
	of, path, what string
	err            error
}

func (e *absentError) Error() string {
	return fmt.Sprintf("no configuration of %s at %s: it should be %s; if it is elsewhere, give its path as the argument", e.of, e.path, e.what)
}

func (e *absentError) Unwrap() error { return e.err }

// reader reads the files of one configuration.
type reader struct{ files []string }

// read reads one file and adds it to files.
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

// below lists the files in dir and below it in lexical order, as CRI-O does, whatever their
// names are. A missing directory has none.
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
