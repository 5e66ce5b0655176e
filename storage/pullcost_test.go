package storage

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
)

// What a pull costs beyond the bytes of its image is how often it locks the library's records and writes
// them, which takes longer the more images there are. The library opens a lock file each time.
func TestPullLocksAndWritesRecordsSeldom(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	base := layer(t, image.Text("base", "x"))
	a := build(t, image.Image{Layers: []image.Layer{base, layer(t, image.Text("own", "a"))}})
	b := build(t, image.Image{Layers: []image.Layer{base, layer(t, image.Text("own", "b"))}})
	r := serve(t, "app", "a", a)
	r.Push("app", "b", b)
	r.Push("app", "index", index(t, b))
	n.pull(r.Addr() + "/app:a")
	for _, c := range []struct {
		what, tag string
		most      map[string]int
	}{
		{"an image whose lower layer is there", "b", map[string]int{
			"storage.lock": 22, "layers.lock": 20, "images.lock": 16, "layers.json": 2, "images.json": 4,
		}},
		{"the same again", "b", map[string]int{
			"storage.lock": 5, "layers.lock": 4, "images.lock": 6, "layers.json": 0, "images.json": 0,
		}},
		{"the same by an index", "index", map[string]int{
			"storage.lock": 14, "layers.lock": 13, "images.lock": 21, "layers.json": 0, "images.json": 3,
		}},
	} {
		used := watchRecords(t, n.cfg.Root)
		n.pull(r.Addr() + "/app:" + c.tag)
		times := used()
		for name, most := range c.most {
			if times[name] > most {
				t.Errorf("%s: %s is used %d times, want %d at most", c.what, name, times[name], most)
			}
		}
	}
}

// watchRecords returns a function that says, by name, how often the library's lock files and the directory of
// layers were opened and its records replaced since.
func watchRecords(t *testing.T, root string) (used func() map[string]int) {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(os.NewSyscallError("inotify_init1", err))
	}
	names := map[int]string{} // by watch; each has two kinds of events, as the kernel joins those that are alike and follow each other
	watch := func(path string, events uint32) {
		wd, err := unix.InotifyAddWatch(fd, filepath.Join(root, path), events)
		if err != nil {
			t.Fatal(&os.PathError{Op: "inotify_add_watch", Path: path, Err: err})
		}
		names[wd] = filepath.Base(path)
	}
	for _, path := range []string{"storage.lock", "overlay-layers/layers.lock", "overlay-images/images.lock", driverName} {
		watch(path, unix.IN_OPEN|unix.IN_CLOSE)
	}
	watch("overlay-layers", unix.IN_CREATE|unix.IN_MOVED_TO)
	watch("overlay-images", unix.IN_CREATE|unix.IN_MOVED_TO)
	return func() map[string]int {
		defer unix.Close(fd)
		times := map[string]int{}
		buffer := make([]byte, 64<<10)
		for {
			size, err := unix.Read(fd, buffer)
			if errors.Is(err, unix.EAGAIN) {
				return times
			}
			if err != nil {
				t.Fatal(os.NewSyscallError("read", err))
			}
			for at := 0; at < size; {
				wd, mask := int(int32(binary.NativeEndian.Uint32(buffer[at:]))), binary.NativeEndian.Uint32(buffer[at+4:])
				name := unix.ByteSliceToString(buffer[at+unix.SizeofInotifyEvent : at+unix.SizeofInotifyEvent+int(binary.NativeEndian.Uint32(buffer[at+12:]))])
				at += unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(buffer[at+12:]))
				switch {
				case mask&unix.IN_Q_OVERFLOW != 0:
					t.Fatal("too many events")
				case mask&unix.IN_OPEN != 0:
					times[names[wd]]++
				case mask&unix.IN_MOVED_TO != 0 && strings.HasSuffix(name, ".json"):
					times[name]++
				}
			}
		}
	}
}
