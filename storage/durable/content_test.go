package durable

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// A layer's archive may name its files as it likes: looking for them ends, stays
// an error that says so, and changes nothing.
func FuzzLayerHeaders(f *testing.F) {
	archiveOf := func(headers ...*tar.Header) []byte {
		var out bytes.Buffer
		w := tar.NewWriter(&out)
		for _, h := range headers {
			if err := w.WriteHeader(h); err != nil {
				f.Fatal(err)
			}
		}
		return out.Bytes()
	}
	f.Add(archiveOf(&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}, &tar.Header{Name: "etc/motd", Typeflag: tar.TypeReg}))
	f.Add(archiveOf(&tar.Header{Name: "a", Typeflag: tar.TypeSymlink, Linkname: "/"}, &tar.Header{Name: "a/b/../../../c", Typeflag: tar.TypeLink, Linkname: ".."}))
	f.Add(archiveOf(&tar.Header{Name: "..", Typeflag: tar.TypeSymlink, Linkname: "x"}, &tar.Header{Name: "../a/b", Typeflag: tar.TypeReg}))
	f.Add(archiveOf(&tar.Header{Name: ".wh..wh..opq", Typeflag: tar.TypeReg}, &tar.Header{Name: "x/.wh.y", Typeflag: tar.TypeReg}, &tar.Header{Name: ".wh."}))
	f.Add(archiveOf(&tar.Header{Name: "/", Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"a": "b"}}))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c := newComparison(t.TempDir(), false)
		err := garbled(c.readAll(bytes.NewReader(raw)))
		if err != nil && !certain(err) {
			t.Errorf("an archive that cannot be read is no damage: %v", err)
		}
		for r := tar.NewReader(bytes.NewReader(raw)); err == nil; {
			h, end := r.Next()
			if end != nil {
				break
			}
			name := path.Clean(h.Name)
			if h.Typeflag == tar.TypeXGlobalHeader || strings.HasPrefix(name, "..") || strings.ContainsRune(name, '/') || name == "." {
				continue
			}
			if c.result() == nil {
				t.Errorf("%q is in an empty directory", name)
			}
		}
	})
}

// archived writes an archive to a pipe, as it is read.
func archived(t *testing.T, headers func(add func(*tar.Header))) io.Reader {
	t.Helper()
	r, w := io.Pipe()
	go func() {
		to := tar.NewWriter(w)
		headers(func(h *tar.Header) { _ = to.WriteHeader(h) }) // fails when the test has seen enough
		_ = w.CloseWithError(to.Close())
	}()
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// heap returns the bytes of the heap in use.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Whatever the names and attributes in a layer are, checking it takes little memory for each.
func TestComparisonIsSmall(t *testing.T) { //nolint:paralleltest // measures the heap
	const count = 1000
	dir, long := t.TempDir(), strings.Repeat(strings.Repeat("n", 250)+"/", 14)
	if err := os.MkdirAll(filepath.Join(dir, long), 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range count {
		if err := os.Symlink("x", filepath.Join(dir, long, fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	before := heap()
	c := newComparison(dir, false)
	err := c.readAll(archived(t, func(add func(*tar.Header)) {
		for i := range count {
			add(&tar.Header{Typeflag: tar.TypeSymlink, Name: long + fmt.Sprint(i), Linkname: "x", PAXRecords: map[string]string{"VENDOR.a": strings.Repeat("a", 2000)}})
		}
	}))
	if err := errors.Join(err, c.result()); err != nil {
		t.Error(err)
	}
	if grew := int64(heap() - before); grew > 200*count {
		t.Errorf("%d bytes for each of %d entries", grew/count, count)
	}
	runtime.KeepAlive(c)
}

// A layer in which everything differs is damaged before all differences are in memory.
func TestManyDifferencesAreDamage(t *testing.T) {
	t.Parallel()
	c := newComparison(t.TempDir(), false)
	c.room = 100 << 10
	err := garbled(c.readAll(archived(t, func(add func(*tar.Header)) {
		for i := range 1000 {
			add(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprint("missing", i)})
		}
	})))
	if !errors.Is(err, errDamaged) || !strings.Contains(err.Error(), "missing") || len(c.differ) > 200 {
		t.Errorf("%d differences: %v", len(c.differ), err)
	}
}

// The last entry of a name counts. Files behind links are not looked for, and modes of files with
// several names not compared, whichever entry comes first.
func TestComparison(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	err := errors.Join(os.WriteFile(filepath.Join(dir, "f"), []byte("abc"), 0o600), os.Link(filepath.Join(dir, "f"), filepath.Join(dir, "g")),
		os.Mkdir(filepath.Join(dir, "d"), 0o755), os.Symlink("d", filepath.Join(dir, "l")))
	if err != nil {
		t.Fatal(err)
	}
	file := func(mode int64) *tar.Header { return &tar.Header{Typeflag: tar.TypeReg, Name: "f", Mode: mode} }
	hard := &tar.Header{Typeflag: tar.TypeLink, Name: "g", Linkname: "f"}
	link := &tar.Header{Typeflag: tar.TypeSymlink, Name: "l/", Linkname: "d"}
	below := &tar.Header{Typeflag: tar.TypeDir, Name: "l/x/"}
	global := &tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "f", PAXRecords: map[string]string{"comment": "x"}}
	size := func(h *tar.Header) *tar.Header { h.Size = 3; return h }
	for what, c := range map[string]struct {
		headers []*tar.Header
		damaged bool
	}{
		"same":                       {[]*tar.Header{size(file(0o600)), link}, false},
		"mode":                       {[]*tar.Header{size(file(0o644))}, true},
		"mode, global header":        {[]*tar.Header{size(file(0o644)), global}, true},
		"mode of further name":       {[]*tar.Header{size(file(0o644)), hard}, false},
		"size, then none":            {[]*tar.Header{file(0o600), size(file(0o600))}, false},
		"size":                       {[]*tar.Header{size(file(0o600)), file(0o600)}, true},
		"link elsewhere":             {[]*tar.Header{{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "e"}}, true},
		"behind link":                {[]*tar.Header{link, below}, false},
		"behind link that comes":     {[]*tar.Header{below, link}, false},
		"missing":                    {[]*tar.Header{below}, true},
		"missing file, further name": {[]*tar.Header{{Typeflag: tar.TypeReg, Name: "no"}, {Typeflag: tar.TypeLink, Name: "g", Linkname: "no"}}, true},
	} {
		var archive bytes.Buffer
		w := tar.NewWriter(&archive)
		for _, h := range c.headers {
			if err := w.WriteHeader(h); err != nil {
				t.Fatal(what, err)
			}
			_, _ = w.Write(make([]byte, h.Size))
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		got := newComparison(dir, false)
		if err := got.readAll(&archive); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if err := got.result(); (err != nil) != c.damaged || err != nil && !certain(err) {
			t.Errorf("%s: %v", what, err)
		}
		if behind := strings.HasPrefix(what, "behind"); behind != (got.behind != "") {
			t.Errorf("%s: behind link: %q", what, got.behind)
		}
	}
}
