package layers

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
)

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
		r := newRepeats(room)
		var err error
		added := 0
		for _, text := range strings.Fields(test.layers) {
			if err = r.CheckRepeat(digest.FromString(text)); err != nil {
				break
			}
			var size int64
			if _, scanErr := fmt.Sscan(text, &size); scanErr == nil {
				r.added(digest.FromString(text), size)
				added++
			}
		}
		all := len(strings.Fields(strings.ReplaceAll(test.layers, "x", "")))
		if added != test.added || (err == nil) != (test.added == all) || err != nil && !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %d layers added, want %d; %v", name, added, test.added, err)
		}
	}
}
