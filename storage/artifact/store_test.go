package artifact

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
)

// stored opens a store with one artifact.
func stored(t *testing.T) (s *Store, id string) {
	t.Helper()
	files := image.Files{"dir/a": "a", "b": "b"}
	built, err := files.Build()
	if err != nil {
		t.Fatal(err)
	}
	id = built.Digest().Encoded()
	root := t.TempDir()
	dir := filepath.Join(root, artifactsName, id)
	write := func(name, content string) {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write(manifestName, string(built.Manifest))
	write(recordName, "{}")
	for name, content := range files {
		write(filepath.Join(filesName, name), content)
	}
	if s, err = Open(t.Context(), Config{Dir: root}); err != nil || s.Find(id) == nil {
		t.Fatalf("opened: %v", err)
	}
	return s, id
}

// An artifact that is removed while its last container ends is deleted or refused, but not both.
func TestRemoveDuringTheLastDrop(t *testing.T) {
	t.Parallel()
	for i := range 100 {
		s, id := stored(t)
		dir, err := s.Use(id, "container-volume-0")
		if err != nil {
			t.Fatal(err)
		}
		var both sync.WaitGroup
		begin := make(chan struct{})
		var removed error
		for _, do := range []func(){
			func() { removed = s.Remove(t.Context(), id) },
			func() { s.Drop(t.Context(), id, "container-volume-0") },
		} {
			both.Go(func() {
				<-begin
				do()
			})
		}
		close(begin)
		both.Wait()
		if removed != nil && !errors.Is(removed, fault.Precondition) {
			t.Error(removed)
		}
		if _, err := os.Stat(dir); (err == nil) != (removed != nil) || (s.Find(id) != nil) != (removed != nil) {
			t.Fatalf("round %d: its removal says %v, its files %v", i, removed, err)
		}
		if err := s.Remove(t.Context(), id); err != nil {
			t.Errorf("once nobody uses it: %v", err)
		}
		if _, err := s.Use(id, "container"); !errors.Is(err, fault.NotFound) {
			t.Errorf("used after it was removed: %v", err)
		}
	}
}

// Signatures are kept whatever else of an artifact changes.
func TestRecordsKeepSignatures(t *testing.T) {
	t.Parallel()
	s, id := stored(t)
	one, two := []byte("one"), []byte("two")
	named := Record{Names: []string{"example.com/a:1"}}
	for _, err := range []error{
		s.change(t.Context(), s.Find(id), named, [][]byte{one}),
		s.change(t.Context(), s.Find(id), named, [][]byte{two}),
		s.Unname(t.Context(), named.Names[0]),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	got, err := readRecord(s.path(artifactsName, id))
	if err != nil || len(got.Names) > 0 || !slices.EqualFunc(got.Signatures, [][]byte{two, one}, bytes.Equal) {
		t.Errorf("on the disk is %+v, %v", got, err)
	}
	opened, err := Open(t.Context(), s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if used := s.Usage(); used.Bytes == 0 || used != opened.Usage() {
		t.Errorf("the store takes %+v, and after it is opened again %+v", used, opened.Usage())
	}
}

// All artifacts are in memory, so there is an end to their number and to their names.
func TestStoreIsBounded(t *testing.T) {
	t.Parallel()
	name, err := reference.ParseNormalizedNamed("example.com/a:1")
	if err != nil {
		t.Fatal(err)
	}
	src := &source.Image{Name: name, Files: []source.File{{Path: "a"}}}
	src.Manifests = map[digest.Digest]source.Document{"": {Content: []byte("{}")}}
	full := func(number, pathSize int) {
		s, id := stored(t)
		s.cfg.IsImage = func(string) (bool, error) { return false, nil }
		for i := range number {
			s.publish(&Artifact{ID: strconv.Itoa(i), Files: []source.File{{Path: strings.Repeat("a", pathSize)}}})
		}
		if _, err := s.Pull(t.Context(), src, Terms{}); !errors.Is(err, fault.Exhausted) {
			t.Errorf("pulled beside %d artifacts with names of %d bytes: %v", number, pathSize, err)
		}
		a := s.Find(id)
		if err := s.crowded(a); err != nil {
			t.Errorf("an artifact that is there already: %v", err)
		}
		more := *a
		more.Names = []string{strings.Repeat("a", maxKept)}
		if err := s.crowded(&more); !errors.Is(err, fault.Exhausted) {
			t.Errorf("one that grows: %v", err)
		}
	}
	full(maxArtifacts-1, 0)
	full(32, 1<<20)
}

// What another version of crius has pulled by rules that this one does not have is not
// damaged: it stays.
func TestArtifactOfOtherRules(t *testing.T) {
	t.Parallel()
	s, id := stored(t)
	built, err := image.Files{"../a": "a"}.Build()
	if err != nil {
		t.Fatal(err)
	}
	other := built.Digest().Encoded()
	dir := s.path(artifactsName, other)
	if err := errors.Join(os.Rename(s.path(artifactsName, id), dir), os.WriteFile(filepath.Join(dir, manifestName), built.Manifest, 0o600)); err != nil {
		t.Fatal(err)
	}
	opened, err := Open(t.Context(), s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	opened.Adopt(t.Context(), nil)
	if _, err := os.Stat(filepath.Join(dir, recordName)); err != nil || len(opened.All(t.Context(), nil)) > 0 {
		t.Errorf("it has gone: %v, or is listed: %+v", err, opened.All(t.Context(), nil))
	}
}

// Who waits for another pull waits no longer than its caller.
func TestLocks(t *testing.T) {
	t.Parallel()
	var l locks
	unlock, err := l.lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := errors.New("caller has gone")
	cancel(ended)
	if _, err := l.lock(ctx, "a"); !errors.Is(err, ended) {
		t.Errorf("lock that is held: %v", err)
	}
	other, err := l.lock(ctx, "b")
	if err != nil {
		t.Errorf("another lock: %v", err)
	}
	other()
	next := make(chan error)
	go func() {
		unlock, err := l.lock(t.Context(), "a")
		if err == nil {
			unlock()
		}
		next <- err
	}()
	unlock()
	if err := <-next; err != nil || len(l.held) > 0 {
		t.Errorf("lock that was released: %v, held %v", err, l.held)
	}
}

// A full disk has no room for the directory through which artifacts are removed, so it is
// there from the start.
func TestRoomForRemovals(t *testing.T) {
	t.Parallel()
	s, id := stored(t)
	if _, err := os.Stat(s.path(pendingName)); err != nil {
		t.Error(err)
	}
	if err := os.Remove(s.path(pendingName)); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), id); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(s.path(artifactsName, id)); err == nil {
		t.Error("the artifact's files are there after it was removed")
	}
}

// Content in a file that can get no name is copied.
func TestContentWithoutAName(t *testing.T) {
	t.Parallel()
	content, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	if _, err := content.WriteString("content"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(content.Name()); err != nil {
		t.Fatal(err)
	}
	files := []source.File{{Path: "dir/one", Digest: digest.FromString("content"), Size: 7}, {Path: "other", Digest: digest.FromString("other"), Size: 5}}
	p := &pull{made: &Artifact{Files: files}, dir: t.TempDir()}
	if err := p.take(content, files[0].Digest); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(p.placeOf(files[0]))
	if err != nil || string(got) != "content" {
		t.Errorf("the file has %q, %v", got, err)
	}
	if info, err := os.Stat(p.placeOf(files[0])); err != nil || info.Mode().Perm() != 0o444 {
		t.Errorf("%v, %v", info, err)
	}
	if _, err := os.Stat(p.placeOf(files[1])); err == nil {
		t.Error("a file with other content was made")
	}
}
