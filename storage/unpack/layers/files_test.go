package layers

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

// readingStore reads layers, and fails as the library does.
type readingStore struct{ cstorage.Store }

func (readingStore) PutLayer(id, _ string, _ []string, _ string, _ bool, options *cstorage.LayerOptions, diff io.Reader) (*cstorage.Layer, int64, error) {
	if _, err := io.Copy(io.Discard, diff); err != nil {
		return nil, -1, errors.New("unpacking failed")
	}
	return &cstorage.Layer{ID: id, CompressedSize: *options.OriginalSize}, 0, nil
}

// packed writes count entries.
func packed(t *testing.T, count int, entry func(i int) tar.Header) []byte {
	t.Helper()
	var all bytes.Buffer
	w := tar.NewWriter(&all)
	for i := range count {
		h := entry(i)
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return all.Bytes()
}

func zipped(t *testing.T, content []byte) []byte {
	t.Helper()
	var all bytes.Buffer
	w, err := gzip.NewWriterLevel(&all, gzip.BestSpeed)
	if err == nil {
		_, err = w.Write(content)
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return all.Bytes()
}

func TestBoundFiles(t *testing.T) {
	t.Parallel()
	plain := func(int) tar.Header { return tar.Header{Name: "file"} }
	deep := func(n int) func(int) tar.Header {
		return func(int) tar.Header { return tar.Header{Name: strings.Repeat("d/", n) + "file"} }
	}
	owned := func(i int) tar.Header { return tar.Header{Name: "file", Uid: i, Format: tar.FormatGNU} }
	grouped := func(i int) tar.Header { return tar.Header{Name: "file", Gid: i + 1<<24, Format: tar.FormatPAX} }
	for name, test := range map[string]struct {
		layer []byte
		files int    // that the image has without it
		says  string // empty: it is taken
	}{
		"as many files as may be": {packed(t, 3, plain), maxFiles - 3, ""},
		"one file more":           {packed(t, 3, plain), maxFiles - 2, "files"},
		"as deep as may be":       {packed(t, 1, deep(MaxDepth)), 0, ""},
		"one directory more":      {packed(t, 1, deep(MaxDepth+1)), 0, "directories"},
		"a link to there": {packed(t, 1, func(int) tar.Header {
			return tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: deep(MaxDepth + 1)(0).Name}
		}), 0, "directories"},
		"as many owners as may be":   {packed(t, maxOwners, owned), 0, ""},
		"one owner more":             {packed(t, maxOwners+1, owned), 0, "owners"},
		"one group more":             {packed(t, maxOwners+1, grouped), 0, "groups"},
		"no tar":                     {[]byte(strings.Repeat("no tar ", 100)), 0, "no tar archive"},
		"compressed":                 {zipped(t, packed(t, 1, plain)), 0, ""},
		"compressed twice":           {zipped(t, zipped(t, packed(t, 1, plain))), 0, "compressed twice"},
		"owners that are compressed": {zipped(t, packed(t, maxOwners+1, owned)), 0, "owners"},
		"directories of names":       {packed(t, 3, func(i int) tar.Header { return tar.Header{Name: fmt.Sprint(i, "/d/d/f")} }), maxFiles - 11, "files"},
		"directories that are there": {packed(t, 3, func(i int) tar.Header { return tar.Header{Name: fmt.Sprint("/d/d/d/", i)} }), maxFiles - 6, ""},
		"empty":                      {nil, 0, ""},
		"an end":                     {make([]byte, 1024), 0, ""},
		"cut off":                    {packed(t, 2, plain)[:700], 0, ""}, // the library refuses it
		"too many behind the end":    {append(packed(t, 1, plain), packed(t, 3, plain)...), maxFiles - 2, ""},
		"names that are no text":     {packed(t, 1, func(int) tar.Header { return tar.Header{Name: "\xff/\n/\xfe"} }), 0, ""},
	} {
		store := &fileStore{Store: readingStore{}, totals: totals{files: test.files}}
		layer, _, err := store.PutLayer("id", "", nil, "", false, &cstorage.LayerOptions{}, bytes.NewReader(test.layer))
		switch {
		case test.says == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case test.says == "" && layer.CompressedSize != int64(len(test.layer)):
			t.Errorf("%s: a blob of %d bytes, want %d", name, layer.CompressedSize, len(test.layer))
		case test.says != "" && (!errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), test.says)):
			t.Errorf("%s: %v", name, err)
		case test.says != "" && store.files != test.files:
			t.Errorf("%s: what was refused counts", name)
		}
	}
}

// All layers of an image count, and only those that were added.
func TestBoundFilesOfAllLayers(t *testing.T) {
	t.Parallel()
	layer := packed(t, 400, func(i int) tar.Header { return tar.Header{Name: fmt.Sprint(i)} })
	store := &fileStore{Store: readingStore{}, totals: totals{files: maxFiles - 1000}}
	var errs []error
	for range 3 {
		_, _, err := store.PutLayer("id", "", nil, "", false, &cstorage.LayerOptions{}, bytes.NewReader(layer))
		errs = append(errs, err)
	}
	if errs[0] != nil || errs[1] != nil || !errors.Is(errs[2], fault.Invalid) {
		t.Errorf("%v", errs)
	}
}

// Each directory that is made counts once if entries are in the order of a walk.
func TestImpliedDirectories(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		before, name string
		want         int
	}{
		{"", "a", 0}, {"", "a/b/c", 2}, {"a", "a/b", 0}, {"a/", "a/b/", 0}, {"a/b", "a/c", 0}, {"a/b/c/d", "a/e", 0}, {"a/b", "ab/c", 1}, {"ab/c", "a/c", 1}, {"/a/b", "a/b/c/d", 1},
		{"a/b/c", "a/bc/d", 1}, {"", "", 0}, {"a", "/", 0},
	} {
		if got := implied(test.before, test.name); got != test.want {
			t.Errorf("%q, %q: %d, want %d", test.before, test.name, got, test.want)
		}
	}
}

// Directories have a bound of their own.
func TestBoundDirectories(t *testing.T) {
	t.Parallel()
	layer := packed(t, 3, func(i int) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprint(i)} })
	for before, refused := range map[int]bool{maxDirectories - 3: false, maxDirectories - 2: true} {
		store := &fileStore{Store: readingStore{}, totals: totals{directories: before}}
		if _, _, err := store.PutLayer("id", "", nil, "", false, &cstorage.LayerOptions{}, bytes.NewReader(layer)); errors.Is(err, fault.Invalid) != refused {
			t.Errorf("%d before: %v", before, err)
		}
	}
}

// Holes of sparse files become zeros on the disk: they are as many as gzip could have packed
// into the layers, and not counted by the library.
func TestBoundHoles(t *testing.T) {
	t.Parallel()
	file, err := os.Create(filepath.Join(t.TempDir(), "blob"))
	if err == nil {
		defer file.Close()
		err = file.Truncate(1 << 20)
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		diff    io.Reader
		before  totals
		holes   int64
		refused bool
	}{
		"few":                     {nil, totals{}, smallHoles, false},
		"many":                    {nil, totals{}, smallHoles + 1, true},
		"many in sum":             {nil, totals{holes: smallHoles}, 1, true},
		"as many as can be":       {nil, totals{}, math.MaxInt64, true},
		"for a large layer":       {file, totals{}, holesPerByte << 20, false},
		"too many for it":         {file, totals{}, holesPerByte<<20 + 1, true},
		"for layers before":       {file, totals{blobs: 1 << 20}, holesPerByte << 21, false},
		"too many for all layers": {file, totals{blobs: 1 << 20, holes: 1}, holesPerByte << 21, true},
	} {
		c := &counted{diff: test.diff, totals: test.before}
		if err := c.punch(test.holes); errors.Is(err, fault.Invalid) != test.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}
