package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
)

const (
	pullRounds = 3
	pullLayers = 6
	// pullFiles are in each layer, of up to pullFile bytes, half of it in the mean.
	pullFiles = 500
	pullFile  = 200 << 10
)

// pullRow pulls a large image, removes it, and pulls it again; each time followed
// by another image of the same layers.
func pullRow(ctx context.Context) (tables []table, err error) {
	large, err := buildLarge(ctx)
	if err != nil {
		return nil, err
	}
	c, us, them, err := newServers(ctx, "runc")
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	servers := []*server{us, them}
	var cold, warm [2]outcome
	for round := range pullRounds {
		for i, s := range servers {
			first, second, err := large.pulledBy(ctx, s, round == 0)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.label, err)
			}
			cold[i].add(first)
			warm[i].add(second)
		}
	}
	t := compare(fmt.Sprintf("Image of %.0f MB in %d layers (%.0f MB unpacked), from a registry on the same machine, %d pulls each: seconds",
		large.packed/1e6, pullLayers, large.unpacked/1e6, pullRounds), 0, c.names()...)
	seconds := func(o outcome) []float64 { return []float64{o.wall / pullRounds} }
	cpu := func(o outcome) []float64 { return []float64{o.cpu / pullRounds} }
	t.line("nothing of it there", seconds(cold[0]), seconds(cold[1]))
	t.line("CPU", cpu(cold[0]), cpu(cold[1]))
	t.line("all layers there", seconds(warm[0]), seconds(warm[1]))
	t.line("CPU", cpu(warm[0]), cpu(warm[1]))
	return []table{t.table}, nil
}

// largeImage is one in two versions, which have the same layers.
type largeImage struct {
	versions         []*image.Artifact
	layers           []image.Layer
	sum              string // of /data, as the probe tells it
	packed, unpacked float64
}

// buildLarge makes files with words out of a dictionary, so that they shrink as
// programs and texts do.
func buildLarge(ctx context.Context) (*largeImage, error) {
	repository, err := tools.Repository()
	if err != nil {
		return nil, err
	}
	probe, err := image.GoProgram(ctx, "probe", repository, "./test/images/probe")
	if err != nil {
		return nil, err
	}
	l := new(largeImage)
	random := rand.NewChaCha8([32]byte{})
	words := make([]byte, 4096*8)
	_, _ = random.Read(words)
	sum := sha256.New()
	for i := range pullLayers {
		files := []image.File{image.Dir("data"), image.Dir(fmt.Sprintf("data/%d", i))}
		if i == 0 {
			files = append(files, probe)
		}
		for j := range pullFiles {
			data := make([]byte, 0, pullFile+8)
			for size := random.Uint64() % pullFile; uint64(len(data)) < size; {
				word := random.Uint64() % 4096 * 8
				data = append(data, words[word:word+8]...)
			}
			name := fmt.Sprintf("data/%d/%03d", i, j)
			fmt.Fprintf(sum, "/%s %d\n", name, len(data))
			sum.Write(data)
			l.unpacked += float64(len(data))
			files = append(files, image.Regular(name, 0o644, data))
		}
		layer, err := image.NewLayer(files...)
		if err != nil {
			return nil, err
		}
		l.packed += float64(len(layer.Blob))
		l.layers = append(l.layers, layer)
	}
	l.sum = fmt.Sprintf("%x", sum.Sum(nil))
	for version := range 2 {
		img := image.Image{Layers: l.layers}
		img.Config.Entrypoint = []string{"/probe"}
		img.Config.Labels = map[string]string{"version": fmt.Sprint(version)}
		built, err := img.Build()
		if err != nil {
			return nil, err
		}
		l.versions = append(l.versions, built)
	}
	return l, nil
}

// pulledBy has the server pull one version and then the other, and removes both.
// Read: it also checks what containers of them read.
func (l *largeImage) pulledBy(ctx context.Context, s *server, read bool) (cold, warm outcome, err error) {
	for version, built := range l.versions {
		name := fmt.Sprintf("%s/large:%d", node.RegistryHost, version)
		s.on.Registry.Push("large", fmt.Sprint(version), built)
		s.on.Registry.Forget()
		o, err := accounted(ctx, s, 1, 1, func(ctx context.Context, _ int) (life, error) {
			_, err := s.images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: name}})
			return life{}, err
		})
		if err == nil {
			err = s.pull(ctx, name, built) // it is there, so that this asks what it is
		}
		if err != nil {
			return cold, warm, err
		}
		want := 0
		if version == 0 {
			cold, want = o, pullLayers
		} else {
			warm = o
		}
		if fetched := l.fetched(s); fetched != want {
			return cold, warm, fmt.Errorf("it fetched %d layers instead of %d", fetched, want)
		}
		if read {
			if err := l.read(ctx, s, name); err != nil {
				return cold, warm, err
			}
		}
	}
	for version := range l.versions {
		name := fmt.Sprintf("%s/large:%d", node.RegistryHost, version)
		if _, err := s.images().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: name}}); err != nil {
			return cold, warm, err
		}
	}
	return cold, warm, nil
}

// fetched is how many layers the registry was asked for, of late.
func (l *largeImage) fetched(s *server) (count int) {
	requests := s.on.Registry.Requests()
	for _, layer := range l.layers {
		for _, r := range requests {
			if r.Method == http.MethodGet && strings.HasSuffix(r.Path, "/blobs/"+layer.Digest.String()) {
				count++
				break
			}
		}
	}
	return count
}

// read sums up, in a container of the image, what it has.
func (l *largeImage) read(ctx context.Context, s *server, name string) (err error) {
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
	sum, err := s.exec(ctx, s.pod(reader), []string{"/probe", "sum", "/data"})
	if err == nil && strings.TrimSpace(sum) != l.sum {
		err = fmt.Errorf("the files of image %s are not what was pushed: their sum is %s", name, sum)
	}
	return err
}
