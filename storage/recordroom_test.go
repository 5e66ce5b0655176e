package storage

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/pull"
	"github.com/crius-run/crius/test/kit/image"
)

// The records of all images and layers are in the memory of the server. A pull that would bring
// too many is refused before anything is fetched, and works once others are removed.
func TestRecordsOfTheStoreAreBounded(t *testing.T) {
	t.Parallel()
	text := func(s string) image.Layer { return layer(t, image.Text("f", s)) }
	img := func(layers ...image.Layer) *image.Artifact { return build(t, image.Image{Layers: layers}) }
	base, shared := text("base"), text("shared")
	for name, most := range map[string]pull.RecordCount{"layers": {Images: 10, Layers: 4}, "images": {Images: 2, Layers: 100}} {
		n := newNode(t)
		r := serve(t, "app", "1", img(base, text("1")))
		r.Push("app", "2", img(base, text("2")))
		r.Push("app", "more", img(text("other base"), shared)) // two of layers, one of images
		n.puller.Records.Most = most
		one := n.pull(r.Addr() + "/app:1")
		n.pull(r.Addr() + "/app:2")
		n.pull(r.Addr() + "/app:2") // adds nothing
		for range 2 {
			_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:more"})
			if !errors.Is(err, fault.Exhausted) || !strings.Contains(fmt.Sprint(err), "remove images") {
				t.Errorf("%s: %v", name, err)
			}
		}
		if got := len(n.layerRecords()); got != 3 {
			t.Errorf("%s: a pull that is refused leaves %d layers, want 3", name, got)
		}
		n.remove(one.ID)
		n.pull(r.Addr() + "/app:more")
		if taken := n.puller.Records.Reserved(); taken != (pull.RecordCount{}) {
			t.Errorf("%s: room is taken for %+v when no pull is under way", name, taken)
		}
	}
}
