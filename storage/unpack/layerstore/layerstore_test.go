package layerstore

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/unpack/layers"
	"github.com/crius-run/crius/test/kit/deep"
)

// imageOf returns the layers that have been staged.
func imageOf(all []layers.Addition) (image []layers.Layer) {
	for _, l := range all {
		image = append(image, layers.Layer{Blob: l.Record.Blob, Size: l.Record.Size, DiffID: l.Record.Content})
	}
	return image
}

// Layers are missing from the first one on that the store has not got in its place. It says where the content of
// one is that was made from the same blob, also above another layer, and of none that was made from another.
func TestMissing(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	u := newUnpacker(t, store)
	all := u.stage(t, 3, true)
	image := imageOf(all)
	if Present(store, image) != nil || len(Missing(store, image)) != 3 {
		t.Error("an empty store has layers")
	}
	if added, err := u.add(t, all[:2]); added != 2 || err != nil {
		t.Fatalf("%d, %v", added, err)
	}
	if got := Present(store, image[:2]); len(got) != 2 || got[1].ID != all[1].ID || Present(store, image) != nil {
		t.Errorf("present: %v", got)
	}
	if got := Missing(store, image); len(got) != 1 || got[0].ID != all[2].ID || got[0].Parent != all[1].ID || got[0].Stored != nil {
		t.Errorf("the third one is missing: %+v", got)
	}
	for blob, want := range map[digest.Digest]string{image[1].Blob: all[1].ID, digest.FromString("other bytes of the same content"): ""} {
		l := image[1]
		l.Blob = blob
		got := Missing(store, []layers.Layer{image[2], l})
		if len(got) != 2 || (got[1].Stored != nil) != (want != "") {
			t.Fatalf("%+v", got)
		}
		if want == "" {
			continue
		}
		stored := *got[1].Stored
		if stored.ID != want || stored.BlobSize != 101 || stored.Content != l.DiffID {
			t.Errorf("%+v", stored)
		}
		content := layers.Recall(&stored)
		text, err := io.ReadAll(content)
		if digest.FromBytes(text) != l.DiffID || err != nil {
			t.Errorf("%d bytes, %v", len(text), err)
		}
		ok(t, content.Close())
		ok(t, os.RemoveAll(stored.Files))
		if _, err := io.ReadAll(layers.Recall(&stored)); !errors.Is(err, layers.ErrNotRebuilt) || !strings.Contains(err.Error(), want) {
			t.Errorf("after it was removed: %v", err)
		}
	}
	changed := image[1]
	changed.DiffID = digest.FromString("other content of the same bytes")
	if got := Missing(store, []layers.Layer{image[2], changed}); got[1].Stored != nil {
		t.Errorf("%+v", got[1].Stored)
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// As long as layers are being unpacked there, or wait for those below them, a staging directory is locked.
func TestStagingIsLocked(t *testing.T) {
	t.Parallel()
	s, err := NewStaging(newStore(t, t.TempDir(), ""), t.TempDir())
	ok(t, err)
	f, err := os.Open(filepath.Join(s.Dir, layers.StagingLock))
	ok(t, err)
	defer f.Close()
	for _, want := range []int16{unix.F_WRLCK, unix.F_UNLCK} {
		lock := unix.Flock_t{Type: unix.F_WRLCK}
		if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil || lock.Type != want {
			t.Errorf("lock %d, want %d: %v", lock.Type, want, err)
		}
		if swept := s.Swept(); swept != (want == unix.F_UNLCK) {
			t.Errorf("swept: %t", swept)
		}
		ok(t, s.Delete())
	}
}

// A directory that is deleted while it is being made, as one that was left behind, is made again.
func TestStagingBesideSweeps(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	place := filepath.Join(store.GraphRoot(), "overlay", StagingPlace)
	ok(t, os.MkdirAll(place, 0o700))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			found, _ := os.ReadDir(place)
			for _, dir := range found {
				_ = unix.Rmdir(filepath.Join(place, dir.Name())) // one without a lock is empty
			}
		}
	}()
	for i := range 200 {
		s, err := NewStaging(store, "")
		if err != nil {
			t.Error(err)
			break
		}
		if err := os.WriteFile(filepath.Join(s.Dir, "file"), []byte(fmt.Sprint(i)), 0o600); err != nil {
			t.Error(err)
		}
		ok(t, s.Delete())
	}
	close(stop)
	<-stopped
}

// podman 4 deletes the library's staging directories whenever it ends, even after "podman ps".
func TestUnpackedWhileOtherProgramsEnd(t *testing.T) {
	t.Parallel()
	store := newStore(t, t.TempDir(), "")
	u := newUnpacker(t, store)
	all := u.stage(t, 1, false)
	ok(t, os.RemoveAll(filepath.Join(store.GraphRoot(), "overlay", "staging")))
	if added, err := u.add(t, all); added != 1 || err != nil {
		t.Fatalf("%d, %v", added, err)
	}
	if _, err := os.Stat(filepath.Join(store.GraphRoot(), "overlay", all[0].ID, "diff", "d", "file0")); err != nil {
		t.Error(err)
	}
}

// Whatever a worker that was taken over has left in it, the directory is deleted.
func TestDeepStagingIsDeleted(t *testing.T) {
	t.Parallel()
	if !deep.Alone(t) {
		return
	}
	s, err := NewStaging(newStore(t, t.TempDir(), ""), t.TempDir())
	ok(t, err)
	deep.Nest(t, s.Dir)
	ok(t, s.Delete())
	if !s.Swept() {
		t.Error("it is still there")
	}
}
