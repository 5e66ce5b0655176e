package storage

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// verify is what is said of live root file systems and of the store, a line
// each; mend is done about it.
func (n *node) verify(mend bool, live ...Rootfs) string {
	n.t.Helper()
	defects, err := n.Verify(testContext(n.t), live)
	if err != nil {
		n.t.Fatal(err)
	}
	var lines []string
	for _, d := range defects {
		lines = append(lines, d.Rootfs+" "+d.Object+" "+d.Text)
		if mend && d.Mend != nil {
			if err := d.Mend(testContext(n.t)); err != nil {
				n.t.Errorf("%s: %v", d.Text, err)
			}
		}
	}
	return strings.Join(lines, "\n")
}

func TestVerify(t *testing.T) {
	n, image := pulled(t, motd(t, "hello"))
	r, v := n.rootfs("c1", image.ID), n.rootfs("volume", image.ID)
	v.ReadOnly = true
	n.mount(r)
	n.mount(v)
	if got := n.verify(true, r, v); got != "" {
		t.Errorf("nothing is wrong, but %q", got)
	}

	upper := filepath.Join(r.Dir, upperName)
	if err := os.Rename(upper, upper+".away"); err != nil {
		t.Fatal(err)
	}
	if got := n.verify(true, r, v); !strings.Contains(got, r.ID+" "+image.ID+" its writable layer "+upper+" is gone") {
		t.Errorf("writable layer: %q", got)
	}
	if err := os.Rename(upper+".away", upper); err != nil {
		t.Fatal(err)
	}

	if err := n.UnmountRootfs(v); err != nil {
		t.Fatal(err)
	}
	if got := n.verify(true, r, v); !strings.Contains(got, v.ID+" "+image.ID+" nothing is mounted at "+v.Target) {
		t.Errorf("unmounted: %q", got)
	}
	n.mount(v)

	stray, err := n.store.CreateLayer("", "", nil, "", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := n.verify(false); got != "" {
		t.Errorf("a new layer may be becoming an image: %q", got)
	}
	n.debris.strayAge = time.Nanosecond
	for _, mend := range []bool{false, true} {
		if got := n.verify(mend, r, v); !strings.Contains(got, "layer "+stray.ID) {
			t.Errorf("a layer without an image: %q", got)
		}
	}
	if got := n.verify(false, r, v); got != "" {
		t.Errorf("still %q", got)
	}

	top, err := n.store.Image(image.ID)
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := layerDirs(n.store, top.TopLayer)
	if err != nil {
		t.Fatal(err)
	}
	n.removeRootfs(r)
	n.removeRootfs(v)
	if err := os.RemoveAll(filepath.Dir(dirs[0])); err != nil {
		t.Fatal(err)
	}
	got := n.verify(true, r)
	for _, want := range []string{"its image is damaged", "image " + image.ID + " layers are lost"} {
		if !strings.Contains(got, want) {
			t.Errorf("lost layer: %q, want %q", got, want)
		}
	}
	if got := n.verify(false); got != "" {
		t.Errorf("after all: %q", got)
	}
	n.empty()
}
