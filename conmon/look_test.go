package conmon_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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
		if _, err := look(there, path, absent); !errors.Is(err, fault.Timeout) || !strings.Contains(err.Error(), path+" does not answer") {
			t.Errorf("%s: %v", path, err)
		}
		if took := time.Since(began); took > time.Minute {
			t.Errorf("%s: took %v", path, took)
		}
	}
	gone, cancel := context.WithTimeoutCause(t.Context(), 200*time.Millisecond, fault.Precondition)
	defer cancel()
	if _, err := conmon.Absent(gone, monitorPath, []string{there, point}); !errors.Is(err, fault.Precondition) {
		t.Errorf("a caller who leaves: %v", err)
	}
	if after := threads(t); after > before+2 { // Go makes some when it likes
		t.Errorf("%d threads, and before %d", after, before)
	}
}

func TestAbsentIsMade(t *testing.T) {
	dir := t.TempDir()
	file, missing, below := filepath.Join(dir, "file"), filepath.Join(dir, "a/b//c"), filepath.Join(dir, "file/below")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	absent, err := conmon.Absent(t.Context(), monitorPath, []string{missing, file, dir, below})
	if err != nil || !slices.Equal(absent, []string{missing, below}) {
		t.Errorf("absent are %q, %v", absent, err)
	}
	for range 2 {
		if err := conmon.MakeDirs(t.Context(), monitorPath, []string{missing, file, dir}); err != nil {
			t.Error(err)
		}
	}
	if st, err := os.Stat(missing); err != nil || !st.IsDir() || st.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", st, err)
	}
	err = conmon.MakeDirs(t.Context(), monitorPath, []string{dir, below})
	if !errors.Is(err, syscall.ENOTDIR) || !strings.Contains(err.Error(), "create missing directory "+below) {
		t.Error(err)
	}
	if st, err := os.Stat(file); err != nil || !st.Mode().IsRegular() {
		t.Errorf("%v, %v", st, err)
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
