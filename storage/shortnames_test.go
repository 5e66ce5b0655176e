package storage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crius-run/crius/test/kit/image"
)

// loseShortName removes the link to a layer, and empties the file with its name.
func (n *node) loseShortName(layer string) {
	n.t.Helper()
	file := filepath.Join(filepath.Dir(n.diff(layer)), "link")
	remove(n.t, filepath.Join(n.cfg.Root, "overlay/l", n.text(file)))
	truncate(n.t, file)
}

// A power cut that takes short names, or the files in which they are written down, takes no image: of layers that older
// versions of the library have made, these are all that says which layers are below them.
func TestShortNamesAreMadeAgain(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(n *node, link string){
		"empty file":          func(n *node, link string) { truncate(n.t, link) },
		"zeros":               func(n *node, link string) { ok(n.t, os.WriteFile(link, make([]byte, 26), 0o600)) },
		"no file":             func(n *node, link string) { remove(n.t, link) },
		"no link":             func(n *node, link string) { remove(n.t, filepath.Join(n.cfg.Root, "overlay/l", n.text(link))) },
		"no links":            func(n *node, _ string) { remove(n.t, filepath.Join(n.cfg.Root, "overlay/l")) },
		"several links":       func(n *node, link string) { n.link(link, "A"); n.link(link, "Z") },
		"several and no file": func(n *node, link string) { n.link(link, "0"); n.link(link, "ZZ"); remove(n.t, link) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			base := layer(t, image.Text("base", "b"))
			img := n.pull(serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{base, layer(t, image.Text("top", "t"))}})).Addr() + "/app:1")
			chain := n.chain(img)
			n.cutPower(false, func() {
				remove(t, filepath.Join(n.cfg.Root, "overlay", chain[0], "lower-layers")) // which older versions do not make
				damage(n, filepath.Join(n.cfg.Root, "overlay", chain[1], "link"))
			})
			if left := shortNamesOfNone(t, n.cfg.Root); len(left) > 0 {
				t.Errorf("of no layer: %q", left)
			}
			c := n.rootfs("c", img.ID)
			n.mount(c)
			if got := n.read(c, "base"); got != "b" {
				t.Errorf("the base has %q", got)
			}
			n.removeRootfs(c)
			n.remove(img.ID)
			if left := n.unowned(); len(left) > 0 {
				t.Errorf("left over: %q", left)
			}
		})
	}
}

// text returns the content of a file.
func (n *node) text(path string) string {
	n.t.Helper()
	text, err := os.ReadFile(path)
	ok(n.t, err)
	return string(text)
}

// link makes another short name for the layer whose own is in a file.
func (n *node) link(file, name string) {
	n.t.Helper()
	ok(n.t, os.Symlink(filepath.Join("..", filepath.Base(filepath.Dir(file)), "diff"), filepath.Join(n.cfg.Root, "overlay/l", name)))
}

// A layer whose name is lost takes no name of another layer with it when it is removed.
func TestLostShortNameTakesNoOther(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := serve(t, "app", "1", motd(t, "app"))
	base := layer(t, image.Text("base", "b"))
	r.Push("other", "1", build(t, image.Image{Layers: []image.Layer{base, layer(t, image.Text("top", "t"))}}))
	img, other := n.pull(r.Addr()+"/app:1"), n.pull(r.Addr()+"/other:1")
	lost, kept := n.chain(img)[0], n.chain(other)
	n.cutPower(true, func() { n.loseShortName(lost) })
	if images := n.list(); len(images) != 1 || images[0].ID != other.ID {
		t.Errorf("after the cut there are %+v", images)
	}
	for _, layer := range kept {
		name := n.text(filepath.Join(filepath.Dir(n.diff(layer)), "link"))
		if _, err := os.Stat(filepath.Join(n.cfg.Root, "overlay/l", name)); err != nil {
			t.Error(err)
		}
	}
}
