package checkpoint

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A container can give its files names, attributes and times that few programs expect. None of them keeps it from being
// checkpointed, and all come back.
func TestOddFiles(t *testing.T) {
	t.Parallel()
	upper, root := t.TempDir(), t.TempDir()
	const latin = "caf\xe9" // no UTF-8
	put(t, filepath.Join(upper, latin, latin), "text")
	put(t, filepath.Join(upper, "new\nline"), "")
	must(t, unix.Mknod(filepath.Join(upper, latin, "gone\xff"), unix.S_IFCHR, 0))
	must(t, os.Mkdir(filepath.Join(upper, "again\xff"), 0o755))
	must(t, unix.Setxattr(filepath.Join(upper, "again\xff"), "trusted.overlay.opaque", []byte("y"), 0))
	attributes := map[string]string{"user.a=b%c": "one\x00two", "user.empty": "", "user.\xff": "x"}
	for name, value := range attributes {
		must(t, unix.Setxattr(filepath.Join(upper, latin, latin), name, []byte(value), 0))
	}
	far := time.Date(2400, 1, 2, 3, 4, 5, 6, time.UTC) // more nanoseconds since 1970 than an int64 has
	must(t, os.Chtimes(filepath.Join(upper, "new\nline"), far, far))
	want, err := os.Stat(filepath.Join(upper, "new\nline")) // as the file system keeps it
	must(t, err)
	put(t, filepath.Join(root, latin, "gone\xff/below"), "of the image")
	put(t, filepath.Join(root, "again\xff/below"), "of the image")
	if _, err := LayerSize(upper, nil); err != nil {
		t.Errorf("size: %v", err)
	}
	var archive bytes.Buffer
	changes, err := Diff(t.Context(), upper, nil, &archive)
	must(t, err)
	must(t, Apply(t.Context(), &archive, changes, root))
	if text := read(t, filepath.Join(root, latin, latin)); text != "text" {
		t.Errorf("the file is %q", text)
	}
	for name, want := range attributes {
		value := make([]byte, 64)
		n, err := unix.Getxattr(filepath.Join(root, latin, latin), name, value)
		if err != nil || string(value[:n]) != want {
			t.Errorf("attribute %q: %q, %v", name, value[:max(n, 0)], err)
		}
	}
	if got, err := os.Stat(filepath.Join(root, "new\nline")); err != nil || !got.ModTime().Equal(want.ModTime()) {
		t.Errorf("time: %v, %v, want %v", got.ModTime(), err, want.ModTime())
	}
	for _, gone := range []string{latin + "/gone\xff", "again\xff/below"} {
		if _, err := os.Lstat(filepath.Join(root, gone)); !os.IsNotExist(err) {
			t.Errorf("%q: %v", gone, err)
		}
	}
}

// So do directories that are nested deeper than a path can be long.
func TestDeepDirectories(t *testing.T) {
	t.Parallel()
	upper := t.TempDir()
	const depth = 300
	name := strings.Repeat("d", 20)
	dir, err := os.OpenRoot(upper)
	must(t, err)
	for range depth {
		must(t, dir.Mkdir(name, 0o700))
		below, err := dir.OpenRoot(name)
		must(t, errors.Join(err, dir.Close()))
		dir = below
	}
	must(t, dir.Close())
	var archive bytes.Buffer
	_, err = Diff(t.Context(), upper, nil, &archive)
	must(t, err)
	if headers, _ := entries(t, &archive); len(headers) != depth+1 {
		t.Errorf("%d entries, want %d", len(headers), depth+1)
	}
}
