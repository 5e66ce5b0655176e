package durable

import (
	"slices"
	"testing"

	cstorage "go.podman.io/storage"
)

// loopStore is a store whose layers a and b are above each other.
type loopStore struct{ cstorage.Store }

func (loopStore) Layer(id string) (*cstorage.Layer, error) {
	return &cstorage.Layer{ID: id, Parent: map[string]string{"a": "b", "b": "a"}[id]}, nil
}

func (loopStore) DeleteLayer(string) error { return cstorage.ErrLayerHasChildren }

// Every walk over layers ends, even if they are above each other.
func TestWalksOverLoopsEnd(t *testing.T) {
	t.Parallel()
	image := &cstorage.Image{ID: "image", TopLayer: "a"}
	if got, want := LayersOf(loopStore{}, image), []string{guardOf("image"), "a", "b"}; !slices.Equal(got, want) {
		t.Errorf("layers %q, want %q", got, want)
	}
	v := &check{store: loopStore{}, layers: map[string]*cstorage.Layer{}, damaged: map[string]error{"a": nil, "b": nil}}
	for _, id := range []string{"a", "b"} {
		v.layers[id], _ = v.store.Layer(id)
	}
	if err := v.image(t.Context(), image); err != nil {
		t.Error(err)
	}
	v.damaged["a"] = errDamaged
	v.sweep()
}

func TestLooped(t *testing.T) {
	t.Parallel()
	for list, want := range map[string]string{
		`[{"id":"a"},{"id":"b","parent":"a"},{"id":"c","parent":"a"},{"id":"d","parent":"gone"}]`: "",
		`[{"id":"b","parent":"a"},{"id":"a"}]`:                                                    "",
		`[{"id":"a","parent":"a"}]`:                                                               "layer a is its own ancestor",
		`[{"id":"c","parent":"b"},{"id":"a","parent":"b"},{"id":"b","parent":"a"}]`:               "layer b is its own ancestor",
		`[{"id":"c","layer":"a"}]`:                                                                "",
		`{"a":1}`:                                                                                 "",
		``:                                                                                        "",
	} {
		got := ""
		if err := looped([]byte(list)); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", list, got, want)
		}
	}
}
