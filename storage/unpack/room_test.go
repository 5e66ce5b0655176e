package unpack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/race"
	"github.com/crius-run/crius/internal/thread"
)

// inRoom runs a function where a worker of the program would run that may change what is in own.
func inRoom(t *testing.T, p *Program, own string, do func()) {
	t.Helper()
	namespace, err := p.room()
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	err = thread.Run(func() error {
		if err := enterRoom(namespace, []string{own}); err != nil {
			return err
		}
		do()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// openItself opens this program as that of workers that need dirs.
func openItself(t *testing.T, dirs ...string) *Program {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := OpenProgram(path, dirs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// newStore returns a directory with the directories of two workers and a file of a layer.
func newStore(t *testing.T) (dir, own, other, layer string) {
	t.Helper()
	dir = t.TempDir()
	own, other, layer = filepath.Join(dir, "own"), filepath.Join(dir, "other"), filepath.Join(dir, "layer")
	if err := errors.Join(os.Mkdir(own, 0o700), os.Mkdir(other, 0o700), os.WriteFile(layer, []byte("content"), 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir, own, other, layer
}

// A worker reads the store and changes its own files, and no others in any way. It finds nothing else of the node.
func TestRoom(t *testing.T) {
	t.Parallel()
	store, own, other, layer := newStore(t)
	elsewhere := filepath.Join(t.TempDir(), "file")
	link := filepath.Join(t.TempDir(), "link")
	if err := errors.Join(os.WriteFile(elsewhere, nil, 0o600), os.Symlink(store, link)); err != nil {
		t.Fatal(err)
	}
	p := openItself(t, link, filepath.Join(store, "missing"))
	device := filepath.Join(own, "null")
	refused := map[string]func() error{
		"change a mode":            func() error { return unix.Chmod(layer, 0o4755) },
		"change an owner":          func() error { return unix.Lchown(layer, 1, 1) },
		"change an attribute":      func() error { return unix.Setxattr(layer, "trusted.overlay.opaque", []byte("y"), 0) },
		"change a time":            func() error { return unix.Utimes(layer, make([]unix.Timeval, 2)) },
		"write":                    func() error { return os.WriteFile(layer, nil, 0o600) },
		"write by another path":    func() error { return os.WriteFile(filepath.Join(link, "layer"), nil, 0o600) },
		"change another worker's":  func() error { return unix.Chmod(other, 0o777) },
		"change a device":          func() error { return unix.Chmod(os.DevNull, 0o666) }, // as it is
		"change the program":       func() error { return unix.Chmod(roomProgram, 0o755) },
		"change the root":          func() error { return unix.Chmod("/", 0o777) },
		"write to the root":        func() error { return os.WriteFile("/new", nil, 0o600) },
		"write beside the device":  func() error { return os.WriteFile("/dev/new", nil, 0o600) },
		"open a device of a layer": func() error { _, err := os.OpenFile(device, os.O_WRONLY, 0); return err },
		"run a program of a layer": func() error { return unix.Access(filepath.Join(own, "file"), unix.X_OK) },
	}
	missing := []string{elsewhere, "/etc", "/root", "/run", "/sys", filepath.Join(store, "missing")}
	if !race.Enabled {
		missing = append(missing, "/proc", "/usr")
	}
	inRoom(t, p, own, func() {
		mine := filepath.Join(own, "file")
		if content, err := os.ReadFile(layer); string(content) != "content" || err != nil {
			t.Errorf("layer: %q, %v", content, err)
		}
		err := errors.Join(os.WriteFile(mine, nil, 0o600), unix.Chmod(mine, 0o4755), unix.Lchown(mine, 1, 1), os.WriteFile(os.DevNull, []byte("x"), 0o600),
			unix.Setxattr(mine, "trusted.overlay.opaque", []byte("y"), 0), unix.Mknod(device, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		if err != nil {
			t.Errorf("own files: %v", err)
		}
		for what, try := range refused {
			if err := try(); !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.EACCES) {
				t.Errorf("%s: %v", what, err)
			}
		}
		for _, path := range missing {
			if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v", path, err)
			}
		}
	})
	if _, err := os.Stat(filepath.Join(own, "file")); err != nil {
		t.Error(err)
	}
	inRoom(t, p, other, func() {
		if err := unix.Chmod(own, 0o777); !errors.Is(err, unix.EROFS) {
			t.Errorf("the next worker changes the files of the first: %v", err)
		}
	})
}

// A room holds no mounts of the node but those of the directories that it has, and follows when something else is
// mounted there.
func TestMountsOfARoom(t *testing.T) {
	t.Parallel()
	store, own, _, _ := newStore(t)
	pod := filepath.Join(store, "pod")
	if err := errors.Join(os.Mkdir(pod, 0o700), unix.Mount("test", pod, "tmpfs", 0, "size=64k")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.UnmountBelow(store); err != nil {
			t.Error(err)
		}
	})
	p := openItself(t, store)
	want := []string{"/", store, own, os.DevNull, roomProgram}
	for range 2 {
		inRoom(t, p, own, func() {
			var points []string
			done := make(chan struct{})
			tid := unix.Gettid()
			go func() { // a thread that sees the node
				defer close(done)
				table, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/mountinfo", tid))
				if err != nil {
					t.Error(err)
				}
				for line := range strings.Lines(string(table)) {
					points = append(points, strings.Fields(line)[4])
				}
			}()
			<-done
			points = slices.DeleteFunc(points, func(point string) bool {
				return slices.Contains(race.Needs(), point) || strings.HasPrefix(point, "/usr/lib")
			})
			slices.Sort(points)
			slices.Sort(want)
			if !slices.Equal(points, want) {
				t.Errorf("mounts %q, want %q", points, want)
			}
		})
	}
	if err := unix.Mount("test", store, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(own, 0o700); err != nil {
		t.Fatal(err)
	}
	inRoom(t, p, own, func() {
		if err := os.WriteFile(filepath.Join(own, "upon"), nil, 0o600); err != nil {
			t.Error(err)
		}
	})
	if _, err := os.Stat(filepath.Join(own, "upon")); err != nil {
		t.Error(err)
	}
}

// A node that has no room for workers has workers all the same.
func TestWithoutRoom(t *testing.T) {
	t.Parallel()
	p := openItself(t)
	p.dirs = []string{"a name\x00that no directory has"}
	cmd, room := p.command(t.Context())
	if room != nil || len(cmd.ExtraFiles) != 1 || !strings.HasPrefix(cmd.Path, "/proc/self/fd/") {
		t.Errorf("%v, %v", cmd, room)
	}
}

// A store may have a directory that is elsewhere, as when an administrator moves layers to another disk.
func TestRoomWithLinks(t *testing.T) {
	t.Parallel()
	store, _, _, _ := newStore(t)
	disk := filepath.Join(t.TempDir(), "with a longer name", strings.Repeat("x", 200))
	overlay, own := filepath.Join(store, "overlay"), filepath.Join(store, "overlay", "own")
	if err := errors.Join(os.MkdirAll(disk, 0o700), os.Symlink(disk, overlay), os.Mkdir(own, 0o700)); err != nil {
		t.Fatal(err)
	}
	inRoom(t, openItself(t, store, overlay), own, func() {
		if err := os.WriteFile(filepath.Join(own, "file"), nil, 0o600); err != nil {
			t.Error(err)
		}
		if err := unix.Chmod(disk, 0o777); !errors.Is(err, unix.EROFS) {
			t.Errorf("change the disk: %v", err)
		}
	})
	if _, err := os.Stat(filepath.Join(disk, "own", "file")); err != nil {
		t.Error(err)
	}
}
