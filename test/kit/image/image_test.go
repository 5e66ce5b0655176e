package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/test/kit/image"
)

func TestLayerHoldsItsFiles(t *testing.T) {
	layer, err := image.NewLayer(
		image.Dir("bin"),
		image.Regular("bin/su", 0o4755, []byte("#!")).Owned(1, 2),
		image.Symlink("bin/sh", "su"),
		image.Hardlink("bin/ash", "bin/su"),
		image.Device("dev", 1, 3),
		image.Whiteout("etc/passwd"),
		image.Opaque("var"),
	)
	if err != nil {
		t.Fatal(err)
	}
	if layer.Digest != digest.FromBytes(layer.Blob) {
		t.Error("Digest is not the blob's")
	}
	z, err := gzip.NewReader(bytes.NewReader(layer.Blob))
	if err != nil {
		t.Fatal(err)
	}
	archive, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if layer.DiffID != digest.FromBytes(archive) {
		t.Error("DiffID is not the archive's digest")
	}
	var names []string
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, header.Name)
		if header.Name == "bin/su" && (header.Mode != 0o4755 || header.Uid != 1 || header.Gid != 2 || header.Size != 2) {
			t.Errorf("bin/su: %+v", header)
		}
	}
	want := []string{"bin/", "bin/su", "bin/sh", "bin/ash", "dev", "etc/.wh.passwd", "var/.wh..wh..opq"}
	if got, _ := json.Marshal(names); string(got) != mustJSON(t, want) {
		t.Errorf("entries %s, want %q", got, want)
	}
}

func TestBuildIsReproducibleAndComplete(t *testing.T) {
	layer, err := image.NewLayer(image.Text("a", "b"))
	if err != nil {
		t.Fatal(err)
	}
	for _, docker := range []bool{false, true} {
		from := image.Image{Config: imagespec.ImageConfig{User: "1", StopSignal: "SIGINT"}, Layers: []image.Layer{layer}, Docker: docker}
		built, err := from.Build()
		if err != nil {
			t.Fatal(err)
		}
		again, _ := from.Build()
		if built.Digest() != again.Digest() || built.ID() != again.ID() {
			t.Error("two builds differ")
		}
		var manifest imagespec.Manifest
		if err := json.Unmarshal(built.Manifest, &manifest); err != nil {
			t.Fatal(err)
		}
		if manifest.MediaType != built.MediaType || manifest.Config.Digest.Encoded() != built.ID() {
			t.Errorf("manifest %s", built.Manifest)
		}
		for _, d := range append(manifest.Layers, manifest.Config) {
			if blob := built.Blobs[d.Digest]; int64(len(blob)) != d.Size || digest.FromBytes(blob) != d.Digest {
				t.Errorf("blob %s: %d bytes, descriptor says %d", d.Digest, len(blob), d.Size)
			}
		}
		var config imagespec.Image
		if err := json.Unmarshal(built.Blobs[built.Config], &config); err != nil {
			t.Fatal(err)
		}
		if config.Config.User != "1" || len(config.RootFS.DiffIDs) != 1 || config.RootFS.DiffIDs[0] != layer.DiffID {
			t.Errorf("config %+v", config)
		}
	}
}

func TestIndexListsPlatforms(t *testing.T) {
	arm, err := image.Image{Platform: imagespec.Platform{OS: "linux", Architecture: "arm"}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	here, err := image.Image{}.Build()
	if err != nil {
		t.Fatal(err)
	}
	built, err := image.Index(arm, here)
	if err != nil {
		t.Fatal(err)
	}
	var index imagespec.Index
	if err := json.Unmarshal(built.Manifest, &index); err != nil {
		t.Fatal(err)
	}
	if len(index.Manifests) != 2 || index.Manifests[0].Platform.Architecture != "arm" || index.Manifests[1].Digest != here.Digest() {
		t.Errorf("index %s", built.Manifest)
	}
}

func TestGoProgramIsStatic(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"go.mod":  "module hello\ngo 1.26\n",
		"main.go": "package main\nfunc main() {}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file, err := image.GoProgram(t.Context(), "bin/hello", dir, ".")
	if err != nil {
		t.Fatal(err)
	}
	program, err := elf.NewFile(bytes.NewReader(file.Data))
	if err != nil {
		t.Fatal(err)
	}
	if libraries, _ := program.ImportedLibraries(); len(libraries) > 0 || file.Mode != 0o755 || file.Name != "bin/hello" {
		t.Errorf("%s mode %o needs %q", file.Name, file.Mode, libraries)
	}
	if _, err := image.GoProgram(t.Context(), "x", dir, "./none"); err == nil {
		t.Error("built a package that is not there")
	}
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
