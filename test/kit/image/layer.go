package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"time"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Layer is a gzip-compressed tar archive with its two digests.
type Layer struct {
	Blob   []byte
	Digest digest.Digest // of Blob
	DiffID digest.Digest // of the archive inside
	URLs   []string      // makes it a foreign layer
	Size   int64         // of a blob that is not in Blob; PushBlob passes it to the registry
}

// File is one entry of a layer. Make it with one of the functions below and
// modify it as needed.
type File struct {
	tar.Header
	Data []byte
}

// Text returns a regular file with mode 0644.
func Text(name, content string) File { return Regular(name, 0o644, []byte(content)) }

// Regular returns a regular file; mode may include the setuid, setgid and
// sticky bits as in chmod(2).
func Regular(name string, mode int64, data []byte) File {
	return File{Header: tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, Data: data}
}

// Dir returns a directory with mode 0755.
func Dir(name string) File {
	return File{Header: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755}}
}

// Symlink returns a symbolic link with exactly this target.
func Symlink(name, target string) File {
	return File{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}}
}

// Hardlink returns a further name of target, an earlier entry of the same
// layer.
func Hardlink(name, target string) File {
	return File{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644}}
}

// Device returns a character device node.
func Device(name string, major, minor int64) File {
	return File{Header: tar.Header{Typeflag: tar.TypeChar, Name: name, Mode: 0o666, Devmajor: major, Devminor: minor}}
}

// Whiteout hides name, which is in a lower layer.
func Whiteout(name string) File {
	return Regular(path.Join(path.Dir(name), ".wh."+path.Base(name)), 0, nil)
}

// Opaque hides everything in lower layers below the directory name.
func Opaque(name string) File {
	return Regular(path.Join(name, ".wh..wh..opq"), 0, nil)
}

// Owned gives the file to uid and gid.
func (f File) Owned(uid, gid int) File {
	f.Uid, f.Gid = uid, gid
	return f
}

// NewLayer packs files in the given order.
func NewLayer(files ...File) (Layer, error) {
	archive, err := pack(files)
	return RawLayer(archive), err
}

// NewStoredLayer is NewLayer without compression: a server with the race
// detector takes a second to decompress a program of a few megabytes.
func NewStoredLayer(files ...File) (Layer, error) {
	archive, err := pack(files)
	return compressed(archive, gzip.NoCompression), err
}

func pack(files []File) ([]byte, error) {
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, f := range files {
		header := f.Header
		header.Size = int64(len(f.Data))
		if header.ModTime.IsZero() {
			header.ModTime = time.Unix(1704067200, 0)
		}
		if err := w.WriteHeader(&header); err != nil {
			return nil, fmt.Errorf("layer entry %q: %w", f.Name, err)
		}
		if _, err := w.Write(f.Data); err != nil {
			return nil, fmt.Errorf("layer entry %q: %w", f.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	return archive.Bytes(), nil
}

// RawLayer compresses bytes that claim to be a tar archive.
func RawLayer(archive []byte) Layer { return compressed(archive, gzip.BestSpeed) }

func compressed(archive []byte, level int) Layer {
	var blob bytes.Buffer
	w, _ := gzip.NewWriterLevel(&blob, level) // which is valid
	_, _ = w.Write(archive)                   // a bytes.Buffer takes everything
	_ = w.Close()
	return Layer{
		Blob:   blob.Bytes(),
		Digest: digest.FromBytes(blob.Bytes()),
		DiffID: digest.FromBytes(archive),
	}
}

func (l Layer) descriptor(docker bool) imagespec.Descriptor {
	d := imagespec.Descriptor{
		MediaType: imagespec.MediaTypeImageLayerGzip,
		Digest:    l.Digest,
		Size:      int64(len(l.Blob)),
		URLs:      l.URLs,
	}
	if l.Size > 0 {
		d.Size = l.Size
	}
	if docker {
		d.MediaType = DockerLayer
	}
	return d
}

// HostFile packs a file of this machine, such as a program, under name.
func HostFile(name, file string, mode int64) (File, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return File{}, fmt.Errorf("layer entry %q: %w", name, err)
	}
	return Regular(name, mode, data), nil
}

// GoProgram builds the main package pkg (as `go build` names it, seen from the
// directory dir; empty: the current one) into a static executable called name.
func GoProgram(ctx context.Context, name, dir, pkg string) (File, error) {
	tmp, err := os.MkdirTemp("", "image-go-")
	if err != nil {
		return File{}, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	program := filepath.Join(tmp, "program")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, pkg)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.WaitDelay = 5 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return File{}, fmt.Errorf("go build %s: %w: %s", pkg, err, out)
	}
	return HostFile(name, program, 0o755)
}
