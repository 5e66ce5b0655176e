package storage

import (
	"testing"

	"github.com/crius-run/crius/test/kit/image"
)

// A reload pins and unpins images and artifacts that the store has, without a restart.
func TestPinsOfARunningStoreChange(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	repo := testRepo()
	r := serve(t, repo, "image", motd(t, "pinned"))
	r.Push(repo, "model", files(t, image.Files{"model": "weights"}))
	name := r.Addr() + "/" + repo
	n.pull(name + ":image")
	n.pull(name + ":model")
	for _, c := range []struct {
		patterns []string
		pinned   int
	}{{[]string{name + ":image"}, 1}, {[]string{name + "*"}, 2}, {nil, 0}} {
		cfg := *n.now()
		cfg.PinnedImages = c.patterns
		apply, err := n.Prepare(cfg)
		if err != nil {
			t.Fatal(err)
		}
		apply()
		images, err := n.Images(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		pinned := 0
		for _, img := range images {
			if img.Pinned {
				pinned++
			}
		}
		if len(images) != 2 || pinned != c.pinned {
			t.Errorf("%q: %d of %d images are pinned, want %d", c.patterns, pinned, len(images), c.pinned)
		}
	}
}
