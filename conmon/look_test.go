package conmon_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/testkit/hangfs"
)

// What is there is told from what is not; a path that does not answer, or a
// directory in which one does not, is named in time, and holds no thread of
// this process.
func TestLook(t *testing.T) {
	dir := t.TempDir()
	there, absent, link := filepath.Join(dir, "there"), filepath.Join(dir, "absent"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(there, nil, 0o600), os.Symlink("nowhere", link)); err != nil {
		t.Fatal(err)
	}
	look := func(paths ...string) ([]string, error) { return conmon.Look(t.Context(), monitorPath, paths) }
	if got, err := look(there, absent, dir, link, there+"/below", "/dev/null"); err != nil || !slices.Equal(got, []string{absent, link, there + "/below"}) {
		t.Errorf("absent are %q, %v", got, err)
	}
	if got, err := look(); len(got) > 0 || err != nil {
		t.Errorf("nothing to look at: %q, %v", got, err)
	}
	if _, err := conmon.Look(t.Context(), absent, []string{there}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), absent) {
		t.Errorf("without the program: %v", err)
	}

	above := t.TempDir()
	point := filepath.Join(above, "point")
	if err := os.Mkdir(point, 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := hangfs.Mount(point)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Release(); err != nil {
			t.Error(err)
		}
	})
	f.Hang()
	before := threads(t)
	for _, path := range []string{above, point, filepath.Join(point, "file")} {
		began := time.Now()
		if _, err := look(there, path, absent); !errors.Is(err, fault.Timeout) || !strings.Contains(err.Error(), path+": it does not answer") {
			t.Errorf("%s: %v", path, err)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("%s: took %v", path, took)
		}
	}
	if after := threads(t); after > before+2 { // Go makes some when it likes
		t.Errorf("%d threads, and before %d", after, before)
	}
}

func threads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(tasks)
}
