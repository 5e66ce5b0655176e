package storage

import (
	"bytes"
	"log/slog"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// An image for another processor is pulled, since an emulator may run it, and known as such.
func TestImageOfAnotherArchitecture(t *testing.T) { // not parallel: it replaces the logger
	n := newNode(t)
	r := registrytest.Start(t)
	a, err := image.Image{Platform: imagespec.Platform{OS: "linux", Architecture: "s390y"}, Layers: []image.Layer{layer(t, image.Regular("etc/motd", 0o644, []byte("far")))}}.Build()
	if err != nil {
		t.Fatal(err)
	}
	r.Push("app", "1", a)
	var said bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&said, nil)))
	pulled := n.pull(r.Addr() + "/app:1")
	slog.SetDefault(before)
	if pulled.Foreign != "s390y" || !bytes.Contains(said.Bytes(), []byte(`msg="image is for another architecture`)) {
		t.Errorf("foreign %q; the log says %s", pulled.Foreign, said.Bytes())
	}
}
