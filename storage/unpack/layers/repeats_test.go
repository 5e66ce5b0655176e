package layers

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

// sizedStore has layers with the sizes that their content names.
type sizedStore struct {
	cstorage.Store
	puts int
}

func (s *sizedStore) PutLayer(id, _ string, _ []string, _ string, _ bool, options *cstorage.LayerOptions, diff io.Reader) (*cstorage.Layer, int64, error) {
	text, err := io.ReadAll(diff)
	if err != nil {
		return nil, -1, err
	}
	var size int64
	if _, err := fmt.Sscan(string(text), &size); err != nil {
		return nil, -1, cstorage.ErrDuplicateID
	}
	s.puts++
	return &cstorage.Layer{ID: id, UncompressedDigest: digest.FromBytes(text), UncompressedSize: size}, size, nil
}

// Layers that repeat others may unpack to the room, or to as much as those others. A layer that
// repeats none is never refused, and a layer that was not added does not count.
func TestBoundRepeats(t *testing.T) {
	t.Parallel()
	const room = 100
	for name, test := range map[string]struct {
		layers string // size and content of each
		added  int
	}{
		"no repeats":              {"1000a 1000b 1b", 3},
		"small":                   {"1a" + strings.Repeat(" 1a", 100), 101},
		"many":                    {"1a" + strings.Repeat(" 1a", 101), 101},
		"once more what is large": {"1000a 1000a", 2},
		"and again":               {"1000a 1000a 1000a", 2},
		"others make up for it":   {"1000a 1000a 1000b 1000a 1000b", 4},
		"two that repeat":         {"60a 60b 60b 60a 60a", 4},
		"one below room":          {"60a 60a 60a 60b 40a", 2},
		"not added":               {"x x x 60a 60a", 2},
	} {
		inner := &sizedStore{}
		store := BoundRepeats(inner, room)
		var err error
		for _, text := range strings.Fields(test.layers) {
			options := &cstorage.LayerOptions{UncompressedDigest: digest.FromString(text)}
			if _, _, err = store.PutLayer("id", "", nil, "", false, options, strings.NewReader(text)); errors.Is(err, cstorage.ErrDuplicateID) {
				err = nil
			}
			if err != nil {
				break
			}
		}
		all := len(strings.Fields(strings.ReplaceAll(test.layers, "x", "")))
		if inner.puts != test.added || (err == nil) != (test.added == all) || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %d layers added, want %d; %v", name, inner.puts, test.added, err)
		}
	}
}
