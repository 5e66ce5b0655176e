package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
)

// A kubelet asks for all images and for what they take every ten seconds, for as long as the node lives.
// While no image comes or goes, that opens no lock and reads no list, however many images there are; and
// whatever another tool changes is seen.
func TestUnchangedImagesAreNotReadAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("own", "a"))}})
	b := build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("own", "b"))}})
	r := serve(t, "app", "a", a)
	r.Push("app", "b", b)
	n.pull(r.Addr() + "/app:a")
	images := filepath.Join(n.cfg.Root, "overlay-images", "images.json")
	layers := filepath.Join(n.cfg.Root, driverName)
	age := func(files ...string) {
		t.Helper()
		old := time.Now().Add(-time.Hour)
		for _, file := range files {
			if err := os.Chtimes(file, old, old); err != nil {
				t.Fatal(err)
			}
		}
	}
	ask := func(want int) (used uint64) {
		t.Helper()
		listed, err := n.Images(t.Context())
		if err != nil || len(listed) != want {
			t.Errorf("%d images are listed instead of %d, %v", len(listed), want, err)
		}
		usage, err := n.imageUsage.sum()
		if err != nil {
			t.Error(err)
		}
		return usage.Inodes
	}
	quiet := func(when string, want int) (used uint64) {
		t.Helper()
		used = ask(want)
		opened := watchRecords(t, n.cfg.Root)
		for range 3 {
			if again := ask(want); again != used {
				t.Errorf("%s: the images take %d inodes, and %d the next time", when, used, again)
			}
		}
		if times := opened(); len(times) > 0 {
			t.Errorf("%s: to list images that have not changed uses %v", when, times)
		}
		return used
	}
	age(images, layers)
	one := quiet("one image", 1)
	n.pull(r.Addr() + "/app:b")
	if two := ask(2); two <= one {
		t.Errorf("two images take %d inodes, one %d", two, one)
	}
	measureBeside := func() {
		t.Helper()
		if err := n.imageUsage.measureBeside(); err != nil {
			t.Fatal(err)
		}
	}
	age(images, layers)
	measureBeside()
	two := quiet("two images", 2)
	other := filepath.Join(layers, strings.Repeat("f", 64)) // layer of another tool's container
	if err := os.MkdirAll(filepath.Join(other, "diff"), 0o755); err != nil {
		t.Fatal(err)
	}
	age(images, layers)
	for used := two; ; { // it grows, which its directory does not show
		last := used
		if err := os.WriteFile(filepath.Join(other, "diff", fmt.Sprint(used)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := n.imageUsage.measure(); err != nil {
			t.Fatal(err)
		}
		if used = quiet("a container has a layer", 2); used <= last {
			t.Errorf("a layer has grown, and %d inodes became %d", last, used)
		}
		if last > two {
			break
		}
	}
	if err := os.RemoveAll(other); err != nil {
		t.Fatal(err)
	}
	n.remove(r.Addr() + "/app:b")
	age(images, layers) // of the same time as before
	if back := quiet("one is removed", 1); back >= two {
		t.Errorf("the image that is left takes %d inodes, both took %d", back, two)
	}
	text, err := os.ReadFile(images)
	if err == nil {
		err = errors.Join(os.WriteFile(images+".new", text, 0o600), os.Rename(images+".new", images))
	}
	if err != nil {
		t.Fatal(err)
	}
	soon := time.Now().Add(time.Hour)
	if err := os.Chtimes(images, soon, soon); err != nil {
		t.Fatal(err)
	}
	opened := watchRecords(t, n.cfg.Root)
	for range 3 { // too young: the next change might not show
		ask(1)
	}
	if times := opened(); times["images.lock"] < 3 || times[driverName] > 0 {
		t.Errorf("to list images that have just changed uses %v", times)
	}
}

// What was changed a moment ago may be changed once more at the same time, by the clock of a file system.
func TestSettled(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		changed, now unix.Timespec
		want         bool
	}{
		{unix.Timespec{Sec: 7, Nsec: 5e8}, unix.Timespec{Sec: 7, Nsec: 5e8}, false},
		{unix.Timespec{Sec: 7, Nsec: 5e8}, unix.Timespec{Sec: 7, Nsec: 5.9e8}, false},
		{unix.Timespec{Sec: 7, Nsec: 5e8}, unix.Timespec{Sec: 7, Nsec: 6e8}, true},
		{unix.Timespec{Sec: 7, Nsec: 9.5e8}, unix.Timespec{Sec: 8, Nsec: 0}, false},
		{unix.Timespec{Sec: 7, Nsec: 9.5e8}, unix.Timespec{Sec: 8, Nsec: 5e7}, true},
		{unix.Timespec{Sec: 7}, unix.Timespec{Sec: 9, Nsec: 9.9e8}, false}, // whole seconds, or pairs of them
		{unix.Timespec{Sec: 7}, unix.Timespec{Sec: 10}, true},
		{unix.Timespec{Sec: 7, Nsec: 1}, unix.Timespec{Sec: 6}, false}, // the clock was set back
	} {
		if got := settled(c.changed, c.now); got != c.want {
			t.Errorf("changed at %v, at %v: %t", c.changed, c.now, got)
		}
	}
}

// Another tool gives a name to another image, and the next look shows it, however soon it comes.
func TestTagMovedByAnotherTool_containerd_3401_containers_storage_943(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "one"))
	r.Push("app", "2", motd(t, "two"))
	images := []*Image{n.pull(r.Addr() + "/app:1"), n.pull(r.Addr() + "/app:2")}
	for round := range 4 {
		want := images[(round+1)%2]
		if out, err := skopeo(t, "copy", "-q", "--src-tls-verify=false", fmt.Sprintf("docker://%s/app:%d", r.Addr(), (round+1)%2+1), n.transport("example.org/app:latest")); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for range 3 {
			if image, err := n.Image(t.Context(), "example.org/app:latest"); err != nil || image.ID != want.ID {
				t.Errorf("round %d: %+v, %v, want image %s", round, image, err, want.ID)
			}
		}
	}
}
