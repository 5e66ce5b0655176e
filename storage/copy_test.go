package storage

import (
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/test/kit/image"
)

// unread is a store of which no layer may be read.
type unread struct {
	cstorage.Store
	t *testing.T
}

func (s unread) Diff(string, string, *cstorage.DiffOptions) (io.ReadCloser, error) {
	s.t.Error("the content of a layer was wanted")
	return nil, errors.ErrUnsupported
}

// The server unpacks nothing itself, whatever it has found before the copy.
func TestCopyOfPresentLayersUnpacksNone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	lower, upper := layer(t, image.Text("lower", "x")), layer(t, image.Text("upper", "y"))
	for i, l := range []image.Layer{lower, upper} {
		name := fmt.Sprintf("part%d", i)
		n.pull(serve(t, name, "1", build(t, image.Image{Layers: []image.Layer{l}})).Addr() + "/" + name + ":1")
	}
	before, err := n.store.Layers()
	if err != nil {
		t.Fatal(err)
	}
	name, err := reference.ParseNormalizedNamed(serve(t, "whole", "1", build(t, image.Image{Layers: []image.Layer{lower, upper}})).Addr() + "/whole:1")
	if err != nil {
		t.Fatal(err)
	}
	policy, err := n.policies.For("")
	if err != nil {
		t.Fatal(err)
	}
	sys := n.registries().Context()
	src, err := source.Open(testContext(t), sys, policy, name, func(digest.Digest) []byte { return nil }, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	store := &source.PresentOnly{Store: unread{n.store, t}}
	src.PresentOnly = true // the upper layer is there, on top of nothing
	if _, err := source.Copy(testContext(t), store, name, src.Opened(), sys, copy.Options{}); !errors.Is(err, source.ErrLayerWanted) {
		t.Errorf("copied: %v", err)
	}
	if after, err := n.store.Layers(); err != nil || len(after) != len(before) {
		t.Errorf("%d layers, %d before, %v", len(after), len(before), err)
	}
}
