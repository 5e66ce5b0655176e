package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/crius-run/crius/test/kit/deep"
)

// Whatever a worker that was taken over has left among the files of its job, they are deleted.
func TestDeepFilesOfJobsAreDeleted(t *testing.T) {
	t.Parallel()
	if !deep.Alone(t) {
		return
	}
	j := &Job{Temporary: filepath.Join(t.TempDir(), "job")}
	if err := os.Mkdir(j.Temporary, 0o700); err != nil {
		t.Fatal(err)
	}
	deep.Nest(t, j.Temporary)
	if err := j.removeFiles(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(j.Temporary); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}
