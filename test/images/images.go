// Package images builds the images that tests and the demo run: small ones on
// top of the probe program, see test/images/probe.
package images

import (
	"context"
	"sync"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/tools"
)

// Probe is the name of the plain image.
const Probe = node.RegistryHost + "/probe:latest"

// Passwd and Group are the user database of every image.
const (
	Passwd = "root:x:0:0:root:/root:/probe\n" +
		"app:x:1001:1002:App:/home/app:/probe\n" +
		"nobody:x:65534:65534::/:/none\n"
	Group = "root:x:0:\napp:x:1002:\nextra:x:2001:app\nmore:x:2002:app,nobody\nnogroup:x:65534:\n"
)

// Layer is the lowest layer of every image, built once.
var Layer = sync.OnceValues(func() (image.Layer, error) {
	path, err := tools.Probe(context.Background())
	if err != nil {
		return image.Layer{}, err
	}
	program, err := image.HostFile("probe", path, 0o755)
	if err != nil {
		return image.Layer{}, err
	}
	tmp := image.Dir("tmp")
	tmp.Mode = 0o1777
	return image.NewStoredLayer(program, tmp,
		image.Dir("etc"), image.Text("etc/passwd", Passwd), image.Text("etc/group", Group),
		image.Dir("home"), image.Dir("home/app").Owned(1001, 1001),
	)
})

// Build makes an image that runs the probe, and sleeps without arguments.
// change may modify its configuration; files, if any, are a further layer.
func Build(change func(*imagespec.ImageConfig), files ...image.File) (*image.Artifact, error) {
	layer, err := Layer()
	if err != nil {
		return nil, err
	}
	img := image.Image{
		Config: imagespec.ImageConfig{
			Entrypoint: []string{"/probe"},
			Cmd:        []string{"sleep"},
			Env:        []string{"PATH=/bin:/", "FROM_IMAGE=yes"},
		},
		Layers: []image.Layer{layer},
	}
	if change != nil {
		change(&img.Config)
	}
	if len(files) > 0 {
		upper, err := image.NewLayer(files...)
		if err != nil {
			return nil, err
		}
		img.Layers = append(img.Layers, upper)
	}
	return img.Build()
}
