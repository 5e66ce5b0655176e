package source

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
)

// Whatever names a manifest has, its files can be made in a directory, each beside the
// others, and nothing outside of it.
func FuzzFilesOf(f *testing.F) {
	for _, names := range [][2]string{
		{"a", "b"}, {"a", "a/b"}, {"a/b", "a"}, {"a/b", "a/c"}, {"../x", "y"}, {"/etc/passwd", ""}, {"./a//b/", "a/b"}, {"..", "."}, {"a\x00", "\xff"}, {"", ""},
	} {
		f.Add(names[0], names[1])
	}
	f.Fuzz(func(t *testing.T, one, other string) {
		named := func(name string) imagespec.Descriptor {
			return imagespec.Descriptor{Digest: emptyDigest, Annotations: map[string]string{imagespec.AnnotationTitle: name}}
		}
		m := imagespec.Manifest{Layers: []imagespec.Descriptor{named(one), named(other)}}
		m.SchemaVersion = 2
		raw, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		files, err := FilesOf(raw)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%q, %q: %v", one, other, err)
			}
			return
		}
		dir := t.TempDir()
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		for _, file := range files {
			if err := root.MkdirAll(filepath.Dir(file.Path), 0o755); err != nil {
				t.Fatalf("%q, %q: %v", one, other, err)
			}
			made, err := root.OpenFile(file.Path, os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				t.Fatalf("%q, %q: %v", one, other, err)
			}
			made.Close()
		}
	})
}
