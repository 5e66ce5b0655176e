package layers

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/unpack/extract"
)

// look counts a layer of an image with these totals.
func look(t *testing.T, layer []byte, before totals) (*image, error) {
	t.Helper()
	of := &image{totals: before}
	counted := newCounted(of, nil)
	for entries := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := entries.Next()
		if errors.Is(err, io.EOF) {
			return of, nil
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := counted.Entry(h); err != nil {
			counted.forget()
			return of, err
		}
	}
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
		"as deep as may be":       {packed(t, 1, deep(extract.MaxDepth)), 0, ""},
		"one directory more":      {packed(t, 1, deep(extract.MaxDepth+1)), 0, "directories"},
		"a link to there": {packed(t, 1, func(int) tar.Header {
			return tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: deep(extract.MaxDepth + 1)(0).Name}
		}), 0, "directories"},
		"as many owners as may be":   {packed(t, maxOwners, owned), 0, ""},
		"one owner more":             {packed(t, maxOwners+1, owned), 0, "owners"},
		"one group more":             {packed(t, maxOwners+1, grouped), 0, "groups"},
		"directories of names":       {packed(t, 3, func(i int) tar.Header { return tar.Header{Name: fmt.Sprint(i, "/d/d/f")} }), maxFiles - 11, "files"},
		"directories that are there": {packed(t, 3, func(i int) tar.Header { return tar.Header{Name: fmt.Sprint("/d/d/d/", i)} }), maxFiles - 6, ""},
		"empty":                      {nil, 0, ""},
		"an end":                     {make([]byte, 1024), 0, ""},
		"too many behind the end":    {append(packed(t, 1, plain), packed(t, 3, plain)...), maxFiles - 2, ""},
		"names that are no text":     {packed(t, 1, func(int) tar.Header { return tar.Header{Name: "\xff/\n/\xfe"} }), 0, ""},
	} {
		of, err := look(t, test.layer, totals{files: test.files})
		switch {
		case test.says == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case test.says != "" && (!errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), test.says)):
			t.Errorf("%s: %v", name, err)
		case test.says != "" && of.files != test.files:
			t.Errorf("%s: what was refused counts", name)
		}
	}
}

// All layers of an image count, and only those that were added.
func TestBoundFilesOfAllLayers(t *testing.T) {
	t.Parallel()
	layer := packed(t, 400, func(i int) tar.Header { return tar.Header{Name: fmt.Sprint(i)} })
	sums := totals{files: maxFiles - 1000}
	var errs []error
	for range 3 {
		of, err := look(t, layer, sums)
		sums = of.totals
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
		if _, err := look(t, layer, totals{directories: before}); errors.Is(err, fault.Invalid) != refused {
			t.Errorf("%d before: %v", before, err)
		}
	}
}

// Holes of sparse files become zeros on the disk: they are as many as gzip could have packed
// into the layers, and not counted by the library.
func TestBoundHoles(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		blobs   int64
		before  int64
		holes   int64
		refused bool
	}{
		"few":                 {0, 0, smallHoles, false},
		"many":                {0, 0, smallHoles + 1, true},
		"many in sum":         {0, smallHoles, 1, true},
		"for a large layer":   {1 << 20, 0, holesPerByte << 20, false},
		"too many for it":     {1 << 20, 0, holesPerByte<<20 + 1, true},
		"for all layers":      {2 << 20, holesPerByte << 20, holesPerByte << 20, false},
		"too many for all":    {2 << 20, holesPerByte<<20 + 1, holesPerByte << 20, true},
		"blob that is broken": {-1, 0, smallHoles + 1, true},
	} {
		c := newCounted(&image{totals: totals{holes: test.before}}, func() (int64, error) {
			if test.blobs < 0 {
				return 0, fault.Invalid
			}
			return test.blobs, nil
		})
		if err := c.Holes(test.holes); errors.Is(err, fault.Invalid) != test.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Layers that are counted side by side, and again, count once.
func TestForgottenLayersDoNotCount(t *testing.T) {
	t.Parallel()
	var of image
	var counting sync.WaitGroup
	for range 8 {
		counting.Go(func() {
			for range 2 {
				c := newCounted(&of, nil)
				if err := errors.Join(c.Entry(&tar.Header{Name: "a/b", Typeflag: tar.TypeDir}), c.Holes(5)); err != nil {
					t.Error(err)
				}
				c.forget()
			}
			if err := newCounted(&of, nil).Entry(&tar.Header{Name: "a/b"}); err != nil {
				t.Error(err)
			}
		})
	}
	counting.Wait()
	if of.totals != (totals{files: 16}) {
		t.Errorf("%+v", of.totals)
	}
}

// Records list few owners, and those of whiteouts not.
func TestRecordedOwners(t *testing.T) {
	t.Parallel()
	c := newCounted(&image{}, nil)
	for i := range KeptOwners {
		if err := errors.Join(c.Entry(&tar.Header{Name: "f", Uid: 100 - i, Gid: 7}), c.Entry(&tar.Header{Name: "d/.wh.f", Uid: i, Gid: i})); err != nil {
			t.Fatal(err)
		}
	}
	uids, gids := c.recorded()
	if len(uids) != KeptOwners || uids[0] != 101-KeptOwners || !slices.Equal(gids, []uint32{7}) {
		t.Errorf("%d, %d", uids, gids)
	}
	if err := c.Entry(&tar.Header{Name: "f"}); err != nil {
		t.Fatal(err)
	}
	if uids, gids := c.recorded(); uids != nil || gids != nil {
		t.Errorf("%d, %d", uids, gids)
	}
}
