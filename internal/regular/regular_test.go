package regular

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
)

const limit = 100

// readers are the ways to read a file of a directory.
var readers = map[string]func(dir, name string) ([]byte, error){
	"Read":   func(dir, name string) ([]byte, error) { return Read(filepath.Join(dir, name), limit) },
	"ReadIn": func(dir, name string) ([]byte, error) { return ReadIn(dir, name, limit) },
}

func TestReadRefusesWhatIsNotAnOrdinaryFile(t *testing.T) {
	t.Parallel()
	for what, make := range map[string]func(path string) error{
		"named pipe":        func(p string) error { return unix.Mkfifo(p, 0o666) },
		"device":            func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))) },
		"socket":            func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o666, 0) },
		"directory":         func(p string) error { return os.Mkdir(p, 0o755) },
		"link to a pipe":    func(p string) error { return errors.Join(unix.Mkfifo(p+"2", 0o666), os.Symlink(p+"2", p)) },
		"loop":              func(p string) error { return os.Symlink(p, p) },
		"sparse file":       func(p string) error { return errors.Join(os.WriteFile(p, nil, 0o644), os.Truncate(p, 10<<40)) },
		"one byte too many": func(p string) error { return os.WriteFile(p, []byte(strings.Repeat("x", limit+1)), 0o644) },
	} {
		for how, read := range readers {
			dir := t.TempDir()
			if err := make(filepath.Join(dir, "file")); err != nil {
				t.Fatal(err)
			}
			_, err := read(dir, "file")
			if refused := errors.Is(err, fault.Invalid) || what == "loop" && errors.Is(err, unix.ELOOP); !refused {
				t.Errorf("%s of a %s: %v, want fault.Invalid", how, what, err)
			}
		}
	}
}

func TestReadFollowsLinksAndReadInDoesNot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	err := errors.Join(
		os.Mkdir(filepath.Join(dir, "sub"), 0o755), os.WriteFile(filepath.Join(dir, "sub", "file"), []byte("text"), 0o644),
		os.Symlink("sub/file", filepath.Join(dir, "link")), os.Symlink("sub", filepath.Join(dir, "dirlink")),
	)
	if err != nil {
		t.Fatal(err)
	}
	for name, direct := range map[string]bool{"sub/file": true, "link": false, "dirlink/file": false} {
		if data, err := Read(filepath.Join(dir, name), limit); err != nil || string(data) != "text" {
			t.Errorf("Read of %s: %q, %v", name, data, err)
		}
		data, err := ReadIn(dir, name, limit)
		if direct && (err != nil || string(data) != "text") || !direct && !errors.Is(err, fault.Invalid) {
			t.Errorf("ReadIn of %s: %q, %v", name, data, err)
		}
	}
	if data, err := ReadIn(filepath.Join(dir, "dirlink"), "file", limit); err != nil || string(data) != "text" {
		t.Errorf("a link to the directory itself: %q, %v", data, err)
	}
	if _, err := ReadIn(dir, "../"+filepath.Base(dir)+"/sub/file", limit); err == nil {
		t.Error("ReadIn leaves its directory")
	}
}

// The file may have any size.
func TestOpen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	err := errors.Join(
		os.WriteFile(path("file"), []byte("text"), 0o644), os.Truncate(path("file"), 10<<40),
		os.Symlink("file", path("link")), unix.Mkfifo(path("pipe"), 0o666),
	)
	if err != nil {
		t.Fatal(err)
	}
	f, err := Open(path("file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	begin := make([]byte, 4)
	if _, err := io.ReadFull(f, begin); err != nil || string(begin) != "text" {
		t.Errorf("%q, %v", begin, err)
	}
	for name, want := range map[string]error{"link": fault.Invalid, "pipe": fault.Invalid, ".": fault.Invalid, "nothing": fs.ErrNotExist} {
		if f, err := Open(path(name)); !errors.Is(err, want) {
			t.Errorf("%s: %v, %v, want %v", name, f, err, want)
		}
	}
}

// The kernel gives up on ".." while anything is renamed, which somebody does all the time.
func TestOpenBelowWhileFilesAreRenamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "etc"), 0o755), os.WriteFile(filepath.Join(dir, "etc/file"), nil, 0o644), os.WriteFile(a, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	var over atomic.Bool
	var renaming sync.WaitGroup
	defer renaming.Wait()
	defer over.Store(true)
	renaming.Go(func() {
		for !over.Load() {
			_ = os.Rename(a, b)
			a, b = b, a
			for pause := time.Now(); time.Since(pause) < 20*time.Microsecond; { // many lookups fit in between
			}
		}
	})
	for range 20_000 {
		f, err := OpenBelow(root, "etc/../etc/file")
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
}

// The directory is the root: no link or name reaches anything outside, and only
// regular files are opened.
func TestOpenBelow(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	err := errors.Join(
		os.WriteFile(filepath.Join(dir, "outside"), []byte("outside"), 0o644), os.MkdirAll(path("root/etc"), 0o755),
		os.WriteFile(path("root/etc/file"), []byte("inside"), 0o644), os.Symlink("/etc", path("root/absolute")),
		os.Symlink("../../../etc/file", path("root/upward")), os.Symlink("../outside", path("root/out")), os.Symlink("/dev", path("root/devices")),
		os.Symlink("/proc/self/root", path("root/magic")), unix.Mkfifo(path("root/pipe"), 0o666),
	)
	if err != nil {
		t.Fatal(err)
	}
	root, err := unix.Open(path("root"), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	for _, name := range []string{"etc/file", "/etc/file", "absolute/file", "upward", "../etc/file", "./etc//file", "etc/../etc/file"} {
		f, err := OpenBelow(root, name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if content, err := io.ReadAll(f); string(content) != "inside" || err != nil {
			t.Errorf("%s: %q, %v", name, content, err)
		}
		f.Close()
	}
	for name, want := range map[string]error{
		"pipe": fault.Invalid, "etc": fault.Invalid, ".": fault.Invalid, "out": fs.ErrNotExist, "../outside": fs.ErrNotExist,
		"devices/zero": fs.ErrNotExist, "magic/etc/passwd": fs.ErrNotExist, "": fs.ErrNotExist,
	} {
		if f, err := OpenBelow(root, name); !errors.Is(err, want) {
			t.Errorf("%s: %v, %v, want %v", name, f, err, want)
		}
	}
}

func TestReadInWantsADirectoryOfItsOwn(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(dir string) error{
		"another user's":    func(dir string) error { return os.Chown(dir, 1001, 0) },
		"writable by group": func(dir string) error { return os.Chmod(dir, 0o770) },
		"writable by all":   func(dir string) error { return os.Chmod(dir, 0o703) },
	} {
		dir := t.TempDir()
		if err := errors.Join(os.WriteFile(filepath.Join(dir, "file"), nil, 0o644), change(dir)); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadIn(dir, "file", limit); !errors.Is(err, fault.Invalid) {
			t.Errorf("a directory that is %s: %v", what, err)
		}
	}
}

func TestReadOfWhatIsNotThere(t *testing.T) {
	t.Parallel()
	for how, read := range readers {
		for _, dir := range []string{t.TempDir(), "/nothing"} {
			if _, err := read(dir, "file"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s in %s: %v", how, dir, err)
			}
		}
	}
}

// A file in /proc has size 0, like a file that grows after the check.
func TestReadIsBoundedWhateverTheSizeSays(t *testing.T) {
	t.Parallel()
	if _, err := Read("/proc/self/status", 10); !errors.Is(err, fault.Invalid) {
		t.Errorf("more than the size promised: %v", err)
	}
}
