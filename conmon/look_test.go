package conmon_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/hangfs"
)

// hostPaths returns HostPaths that use this monitor program.
func hostPaths(monitor string) *conmon.HostPaths { return &conmon.HostPaths{Monitor: monitor} }

func TestLook(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	there, absent, link := filepath.Join(dir, "there"), filepath.Join(dir, "absent"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(there, nil, 0o600), os.Symlink("nowhere", link)); err != nil {
		t.Fatal(err)
	}
	look := func(paths ...string) ([]string, error) { return hostPaths(monitorPath).Look(t.Context(), paths) }
	if got, err := look(there, absent, dir, link, there+"/below", "/dev/null"); err != nil || !slices.Equal(got, []string{absent, link, there + "/below"}) {
		t.Errorf("absent are %q, %v", got, err)
	}
	if got, err := look(); len(got) > 0 || err != nil {
		t.Errorf("nothing to look at: %q, %v", got, err)
	}
	if _, err := hostPaths(absent).Look(t.Context(), []string{there}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), absent) {
		t.Errorf("without the program: %v", err)
	}
}

// hung returns the directory of a file system that does not answer.
func hung(t *testing.T) string {
	t.Helper()
	point := filepath.Join(t.TempDir(), "point")
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
	return point
}

// A path that does not answer, or a directory in which one does not, is named
// in the end. All run concurrently, because each wait takes the full time.
func TestLookAtWhatHangs(t *testing.T) {
	t.Parallel()
	point := hung(t)
	var looks sync.WaitGroup
	for _, path := range []string{filepath.Dir(point), point, filepath.Join(point, "file")} {
		looks.Go(func() {
			p := hostPaths(monitorPath)
			_, err := p.Look(t.Context(), []string{"/", path, "/absent"})
			if !errors.Is(err, fault.Timeout) || !strings.Contains(err.Error(), path+" did not respond") {
				t.Errorf("%s: %v", path, err)
			}
			// While that process hangs, no other one is lost.
			if _, err := p.Absent(t.Context(), []string{path}); !errors.Is(err, fault.Timeout) || !strings.Contains(err.Error(), "earlier request") {
				t.Errorf("%s, again: %v", path, err)
			}
			if _, err := p.Look(t.Context(), []string{"/"}); err != nil {
				t.Errorf("another path: %v", err)
			}
		})
	}
	looks.Wait()
}

// A caller that stops waiting says nothing about the path: another request for
// it succeeds at once, although the first one's process may not have ended yet.
// The test runs in a bubble, whose time stands still while a process is
// awaited, so that the process is never too slow to end.
func TestLookAfterAnotherCallerLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		p := hostPaths("/bin/false") // which answers nothing
		gone, cancel := context.WithCancelCause(t.Context())
		cancel(fault.Precondition)
		if _, err := p.Look(gone, []string{dir}); !errors.Is(err, fault.Precondition) {
			t.Errorf("a caller who leaves: %v", err)
		}
		p.Monitor = monitorPath
		if absent, err := p.Look(t.Context(), []string{dir}); len(absent) > 0 || err != nil {
			t.Errorf("the next caller: %q are absent, %v", absent, err)
		}
	})
}

// A hanging access holds no thread of this process, and its caller may leave.
// Not parallel: it counts threads.
func TestHungPathBlocksNoThread(t *testing.T) {
	point := hung(t)
	before := threads(t)
	const calls = 40
	for range calls {
		gone, cancel := context.WithTimeoutCause(t.Context(), 20*time.Millisecond, fault.Precondition)
		if _, err := hostPaths(monitorPath).Absent(gone, []string{"/", point}); !errors.Is(err, fault.Precondition) {
			t.Errorf("a caller who leaves: %v", err)
		}
		cancel()
	}
	if after := threads(t); after > before+calls/2 { // Go makes some at any time, the more the busier the machine is
		t.Errorf("%d threads, and before %d", after, before)
	}
}

func TestAbsentIsMade(t *testing.T) {
	dir := t.TempDir()
	file, missing, below := filepath.Join(dir, "file"), filepath.Join(dir, "a/b//c"), filepath.Join(dir, "file/below")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	absent, err := hostPaths(monitorPath).Absent(t.Context(), []string{missing, file, dir, below})
	if err != nil || !slices.Equal(absent, []string{missing, below}) {
		t.Errorf("absent are %q, %v", absent, err)
	}
	for range 2 {
		if err := hostPaths(monitorPath).MakeDirs(t.Context(), []string{missing, file, dir}); err != nil {
			t.Error(err)
		}
	}
	if st, err := os.Stat(missing); err != nil || !st.IsDir() || st.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", st, err)
	}
	err = hostPaths(monitorPath).MakeDirs(t.Context(), []string{dir, below})
	if !errors.Is(err, syscall.ENOTDIR) || !strings.Contains(err.Error(), "create missing directory "+below) {
		t.Error(err)
	}
	if st, err := os.Stat(file); err != nil || !st.Mode().IsRegular() {
		t.Errorf("%v, %v", st, err)
	}
}

// A link that leads to nothing is named, at the end of a path and within it, rather than left to the runtime.
func TestDanglingLinksAreNamed_rook_3529(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink("nowhere", link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, filepath.Join(link, "below")} {
		err := hostPaths(monitorPath).MakeDirs(t.Context(), []string{dir, path})
		if !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), path+" leads through a symbolic link") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 1 {
		t.Errorf("%v, %v", names, err)
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
