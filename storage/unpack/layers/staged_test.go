package layers

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

// A layer whose directory another program has deleted meanwhile is unpacked again, whatever looked
// wrong with it, such as a hard link to a file that was there; and so is one that seems whole.
func TestSweptLayerIsNotToBlame(t *testing.T) {
	t.Parallel()
	dir := &stagingDir{path: t.TempDir()}
	lock := filepath.Join(dir.path, StagingLock)
	if err := os.WriteFile(lock, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	invalid := fmt.Errorf("a hard link to nothing: %w", fault.Invalid)
	for _, err := range []error{nil, invalid} {
		if got := dir.swept(err); !errors.Is(got, err) || swept(got) {
			t.Errorf("%v became %v", err, got)
		}
	}
	if err := os.Remove(lock); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{nil, invalid} {
		if got := dir.swept(err); !swept(got) || errors.Is(got, fault.Invalid) {
			t.Errorf("%v became %v", err, got)
		}
	}
}

// podman 4 deletes the library's staging directories whenever it ends, even after "podman ps".
func TestUnpackingWhileOtherProgramsEnd(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	u := NewUnpacker(store, t.TempDir(), 0)
	content := packed(t, 100, func(i int) tar.Header { return tar.Header{Name: fmt.Sprint("file", i), Mode: 0o644} })
	podman := func() {
		if err := os.RemoveAll(filepath.Join(store.GraphRoot(), "overlay", "staging")); err != nil {
			t.Error(err)
		}
	}
	var begun []string
	halfway := during(func() {
		begun, _ = filepath.Glob(filepath.Join(store.GraphRoot(), "overlay", StagingPlace, "*", "dir", "file*"))
		podman()
	})
	half := iotest.OneByteReader(bytes.NewReader(content[:len(content)/2]))
	rest := bytes.NewReader(content[len(content)/2:])
	s, err := u.Stage(t.Context(), io.MultiReader(half, halfway, rest), nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(begun) == 0 {
		t.Error("nothing was unpacked halfway")
	}
	podman()
	diff := digest.FromBytes(content)
	if added, err := u.Add(t.Context(), []Addition{{s, layerID("", diff), "", Record{Blob: diff, Size: 1, Content: diff}}}); added != 1 || err != nil {
		t.Fatalf("%d, %v", added, err)
	}
	if err := s.Drop(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(filepath.Join(store.GraphRoot(), "overlay", StagingPlace)); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	files, err := os.ReadDir(filepath.Join(store.GraphRoot(), "overlay", layerID("", diff), "diff"))
	if err != nil || len(files) != 100 {
		t.Errorf("%d files, %v", len(files), err)
	}
}

// during does something between two readers, on another thread: the one that unpacks a layer has the layer as its root.
type during func()

func (f during) Read([]byte) (int, error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
	return 0, io.EOF
}

// As long as a layer is being unpacked, or waits for those below it, its directory is locked.
func TestStagingDirIsLocked(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	d, err := newStagingDir(store)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(d.path, StagingLock))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, want := range []int16{unix.F_WRLCK, unix.F_UNLCK} {
		lock := unix.Flock_t{Type: unix.F_WRLCK}
		if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil || lock.Type != want {
			t.Errorf("lock %d, want %d: %v", lock.Type, want, err)
		}
		if err := d.delete(); err != nil {
			t.Error(err)
		}
	}
}

// The library is asked only for the directories of layers that it has had before.
func TestStackGrows(t *testing.T) {
	t.Parallel()
	s := stack{store: &fakeStore{}}
	s.grow("", "a", "/a")
	s.grow("a", "b", "/b")
	if dirs, err := s.of("b"); err != nil || !slices.Equal(dirs, []string{"/b", "/a"}) {
		t.Errorf("%q, %v", dirs, err)
	}
	s.grow("other", "c", "/c")
	for _, unknown := range []string{"a", "c", "other"} {
		if dirs, err := s.of(unknown); err == nil {
			t.Errorf("%s: %q without the library", unknown, dirs)
		}
	}
}
