package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
)

// servedImage is an image in the machine's registry. The guest reads it as
// JSON; blobs and manifests are files named by their digests.
type servedImage struct {
	Name     string // of its repository
	ID       string // that the runtime must report
	Digest   string // of its manifest
	Blobs    []string
	Manifest []byte
	Sum      string // of the list of its files
}

// tree is the content of stacked layers.
type tree map[string]image.File

// add adds a layer on top.
func (t tree) add(files []image.File) {
	for _, f := range files {
		name := strings.TrimSuffix(f.Name, "/")
		dir, base := path.Split(name)
		switch hidden, whiteout := strings.CutPrefix(base, ".wh."); {
		case whiteout && hidden == ".wh..opq":
			for below := range t {
				if strings.HasPrefix(below, dir) && !slices.ContainsFunc(files, func(f image.File) bool { return f.Name == below }) {
					delete(t, below)
				}
			}
		case whiteout:
			delete(t, dir+hidden)
		case f.Linkname != "" && f.Mode != 0o777: // a hard link has the content of its target
			t[name] = t[f.Linkname]
		default:
			t[name] = f
		}
	}
}

// manifest describes each file as the program say will see it.
func (t tree) manifest() []byte {
	var lines []string
	for name, f := range t {
		kind, content := unix.S_IFREG, fmt.Sprintf("%x", sha256.Sum256(f.Data))
		switch f.Typeflag {
		case '5':
			kind, content = unix.S_IFDIR, ""
		case '2':
			kind, content = unix.S_IFLNK, f.Linkname
		}
		lines = append(lines, fmt.Sprintf("/%s %o %d:%d %s\n", name, int64(kind)|f.Mode, f.Uid, f.Gid, content))
	}
	slices.Sort(lines)
	return []byte(strings.Join(lines, ""))
}

// cutLayers returns the layers of the images: they share some, and contain
// files that are big and small, empty, linked, owned and hidden again.
func cutLayers(program image.File) map[string][][]image.File {
	random := rand.New(rand.NewPCG(1, 2))
	noise := func(size int) []byte {
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(random.Uint32())
		}
		return data
	}
	base := []image.File{program, image.Dir("data"), image.Dir("data/tiny"), image.Dir("data/dir"), image.Dir("data/gone")}
	for i := range 150 {
		base = append(base, image.Regular(fmt.Sprintf("data/tiny/%d", i), 0o644, noise(i*i%5000)).Owned(i%3, i%5))
	}
	for i := range 20 {
		base = append(base, image.Hardlink(fmt.Sprintf("data/tiny/link-%d", i), "data/tiny/140").Owned(140%3, 140%5))
		base = append(base, image.Symlink(fmt.Sprintf("data/tiny/to-%d", i), fmt.Sprint("../dir/", i)))
		base = append(base, image.Regular(fmt.Sprintf("data/dir/%d", i), 0o4755, noise(3000)))
		base = append(base, image.Regular(fmt.Sprintf("data/gone/%d", i), 0o600, noise(100)))
	}
	change := func(n int) []image.File {
		files := []image.File{
			image.Whiteout(fmt.Sprintf("data/tiny/%d", n)), image.Whiteout(fmt.Sprintf("data/dir/%d", n)),
			image.Dir("data/gone"), image.Opaque("data/gone"), image.Text("data/gone/new", "new"),
			image.Dir(fmt.Sprintf("data/own-%d", n)), image.Text(fmt.Sprintf("data/own-%d/empty", n), ""),
		}
		for i := range 10 {
			files = append(files, image.Regular(fmt.Sprintf("data/tiny/%d", 100+i), 0o640, noise(2000)))
		}
		return files
	}
	images := map[string][][]image.File{
		"one":   {base, {image.Regular("data/big", 0o644, noise(2<<20))}, change(1)},
		"two":   {base, {image.Regular("data/big", 0o755, noise(3<<20))}, change(2)},
		"alone": {{program, image.Dir("data"), image.Regular("data/huge", 0o644, noise(5<<20)), image.Text("data/small", "small")}},
	}
	many := [][]image.File{base}
	for n := range 3 {
		many = append(many, change(n))
	}
	images["many"] = many
	return images
}

// writeImages builds the images into a directory, for the guest.
func writeImages(ctx context.Context, repo, dir string) error {
	program, err := image.GoProgram(ctx, "say", repo, "./test/node/powercut/say")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var served []servedImage
	for name, layers := range cutLayers(program) {
		one, err := writeImage(dir, name, layers)
		if err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
		served = append(served, one)
	}
	slices.SortFunc(served, func(a, b servedImage) int { return strings.Compare(a.Name, b.Name) })
	index, err := json.Marshal(served)
	return errors.Join(err, os.WriteFile(filepath.Join(dir, "index.json"), index, 0o644))
}

func writeImage(dir, name string, layers [][]image.File) (servedImage, error) {
	all := tree{}
	for _, files := range layers {
		all.add(files)
	}
	manifest := all.manifest()
	layers = append(slices.Clip(layers), []image.File{image.Regular("manifest", 0o644, manifest)})
	to := image.Image{Config: imagespec.ImageConfig{Entrypoint: []string{"/say"}}}
	for _, files := range layers {
		layer, err := image.NewLayer(files...)
		if err != nil {
			return servedImage{}, err
		}
		to.Layers = append(to.Layers, layer)
	}
	built, err := to.Build()
	if err != nil {
		return servedImage{}, err
	}
	out := servedImage{
		Name: name, ID: built.ID(), Digest: built.Digest().String(), Manifest: built.Manifest,
		Sum: fmt.Sprintf("%x", sha256.Sum256(manifest)),
	}
	for d, blob := range built.Blobs {
		out.Blobs = append(out.Blobs, d.String())
		if err := os.WriteFile(filepath.Join(dir, d.String()), blob, 0o644); err != nil {
			return servedImage{}, err
		}
	}
	return out, nil
}
