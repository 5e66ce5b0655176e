package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/tools"
)

// contentShape is the distribution of an image's content.
type contentShape struct {
	layers int
	files  int // in each layer
	file   int // maximum in bytes; the mean is half of that
}

// content is the content of images: layers with a probe and files in /data.
type content struct {
	layers           []image.Layer
	sum              string // of /data, as the probe prints it
	packed, unpacked float64
}

// String returns the size.
func (c *content) String() string {
	return fmt.Sprintf("%.0f MB in %d layers (%.0f MB unpacked)", c.packed/1e6, len(c.layers), c.unpacked/1e6)
}

func newContent(ctx context.Context, of contentShape) (*content, error) {
	repository, err := tools.Repository()
	if err != nil {
		return nil, err
	}
	probe, err := image.GoProgram(ctx, "probe", repository, "./test/images/probe")
	if err != nil {
		return nil, err
	}
	c := &content{layers: make([]image.Layer, of.layers)}
	text := newText()
	sum := sha256.New()
	var packing errgroup.Group
	packing.SetLimit(runtime.NumCPU())
	for i := range of.layers {
		files := []image.File{image.Dir("data"), image.Dir(fmt.Sprintf("data/%03d", i))}
		if i == 0 {
			files = append(files, probe)
		}
		for j := range of.files {
			data := text.next(of.file)
			name := fmt.Sprintf("data/%03d/%03d", i, j)
			fmt.Fprintf(sum, "/%s %d\n", name, len(data))
			sum.Write(data)
			c.unpacked += float64(len(data))
			files = append(files, image.Regular(name, 0o644, data))
		}
		packing.Go(func() (err error) {
			c.layers[i], err = image.NewLayer(files...)
			return err
		})
	}
	if err := packing.Wait(); err != nil {
		return nil, err
	}
	for _, layer := range c.layers {
		c.packed += float64(len(layer.Blob))
	}
	c.sum = fmt.Sprintf("%x", sum.Sum(nil))
	return c, nil
}

// text generates words from a dictionary, so that files compress like programs
// and texts.
type text struct {
	random *rand.ChaCha8
	words  []byte
}

const (
	textWords = 4096
	textWord  = 8 // bytes
)

func newText() *text {
	t := &text{rand.NewChaCha8([32]byte{}), make([]byte, textWords*textWord)}
	_, _ = t.random.Read(t.words)
	return t
}

// next returns a file of at most that many bytes, half of that on average.
func (t *text) next(most int) []byte {
	data := make([]byte, 0, most+textWord)
	for size := t.random.Uint64() % uint64(most); uint64(len(data)) < size; {
		word := t.random.Uint64() % textWords * textWord
		data = append(data, t.words[word:word+textWord]...)
	}
	return data
}

// makeImage returns a version of an image with these layers.
func makeImage(layers []image.Layer, version int) (*image.Artifact, error) {
	img := image.Image{Layers: layers}
	img.Config.Entrypoint = []string{"/probe"}
	img.Config.Labels = map[string]string{"version": fmt.Sprint(version)}
	return img.Build()
}

// smallImages returns images of 1 to 3 MB that share their lowest layer.
func smallImages(count int) (images []*image.Artifact, err error) {
	text := newText()
	layer := func(name string, files int) (image.Layer, error) {
		packed := []image.File{image.Dir(name)}
		for i := range files {
			packed = append(packed, image.Regular(fmt.Sprintf("%s/%d", name, i), 0o644, text.next(200<<10)))
		}
		return image.NewLayer(packed...)
	}
	base, err := layer("base", 10)
	if err != nil {
		return nil, err
	}
	for i := range count {
		own, err := layer("own", 5+8*(i%5))
		if err != nil {
			return nil, err
		}
		built, err := makeImage([]image.Layer{base, own}, i)
		if err != nil {
			return nil, err
		}
		images = append(images, built)
	}
	return images, nil
}

// fetched returns how many of the layers were requested from the server's
// registry since it was last reset.
func (c *content) fetched(s *server) (count int) {
	asked := map[string]bool{}
	for _, r := range s.on.Registry.Requests() {
		if r.Method == http.MethodGet {
			asked[r.Path[strings.LastIndex(r.Path, "/")+1:]] = true
		}
	}
	for _, layer := range c.layers {
		if asked[layer.Digest.String()] {
			count++
		}
	}
	return count
}

// read checks the content as seen by a container of an image.
func (c *content) read(ctx context.Context, s *server, name string) error {
	return s.reads(ctx, name, "/data", c.sum)
}

// reads checks the sum of a directory in a container of an image.
func (s *server) reads(ctx context.Context, name, dir, want string) (err error) {
	before := s.image
	s.image = name
	defer func() { s.image = before }()
	const reader = "reader"
	if _, err := up(ctx, s, reader); err != nil {
		return err
	}
	defer func() {
		_, gone := down(ctx, s, reader)
		err = errors.Join(err, gone)
	}()
	return s.hasSum(ctx, reader, dir, want)
}

// hasSum checks the sum of a directory in a pod's container.
func (s *server) hasSum(ctx context.Context, pod, dir, want string) error {
	sum, err := s.exec(ctx, s.pod(pod), []string{"/probe", "sum", dir})
	if err == nil && strings.TrimSpace(sum) != want {
		err = fmt.Errorf("the files of image %s are not what was pushed: their sum is %s", s.image, sum)
	}
	return err
}
