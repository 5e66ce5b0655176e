package storage

import (
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/crius-run/crius/test/kit/image"
)

// state returns the state of files and directories, which differs after every write.
func state(t *testing.T, root string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err == nil {
			st := info.Sys().(*syscall.Stat_t)
			found[path] = info.ModTime().String() + " " + info.Mode().String() + " " + strconv.FormatUint(st.Ino, 10)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// A pod with the pull policy Always has its image pulled at each start. That asks the
// registry whether the image is the same one and no more, and keeps no disk busy.
func TestPullOfWhatIsUpToDateWritesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "the same")
	r := serve(t, "repo", "image", a)
	r.Push("repo", "index", index(t, a))
	for _, tag := range []string{"image", "index"} {
		ref := r.Addr() + "/repo:" + tag
		first := n.pull(ref)
		r.Forget()
		before := state(t, n.cfg.Root)
		again := n.pull(ref)
		after := state(t, n.cfg.Root)
		if !maps.Equal(before, after) {
			maps.DeleteFunc(after, func(path, as string) bool { return before[path] == as })
			t.Errorf("%s: a pull has written %q", tag, slices.Sorted(maps.Keys(after)))
		}
		equalImages(t, again, first)
		for _, request := range r.Requests() {
			if strings.Contains(request.Path, "/blobs/") {
				t.Errorf("%s: it has fetched %s", tag, request.Path)
			}
		}
	}
}

// What another tool has changed since is put right.
func TestPullOfWhatHasChangedSince(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "changes")
	r := serve(t, "repo", "1", a)
	ref := r.Addr() + "/repo:1"
	first := n.pull(ref)
	if err := n.store.RemoveNames(first.ID, []string{ref}); err != nil {
		t.Fatal(err)
	}
	equalImages(t, n.pull(ref), first)

	// A registry may have another image under the name by now, and the old one again.
	b := build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("etc/motd", "another"))}})
	r.Push("repo", "1", b)
	if other := n.pull(ref); other.ID != b.ID() {
		t.Errorf("the pull returns %s, want %s", other.ID, b.ID())
	}
	r.Push("repo", "1", a)
	equalImages(t, n.pull(ref), first)
}

func equalImages(t *testing.T, got, want *Image) {
	t.Helper()
	if got.ID != want.ID || !slices.Equal(got.RepoTags, want.RepoTags) || !slices.Equal(got.RepoDigests, want.RepoDigests) {
		t.Errorf("the pull returns %+v, want %+v", got, want)
	}
}
