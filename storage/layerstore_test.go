package storage

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
)

// An image that another tool has made of a layer in an additional layer store, such as a
// stargz-store, is run, also in a user namespace, outlives a boot, and is not listed while
// that store is not mounted. crius itself takes nothing from there.
func TestImageOfAdditionalLayerStore(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ok(t, os.MkdirAll(filepath.Join(dir, "reference/digest/diff/etc"), 0o755))
	ok(t, os.WriteFile(filepath.Join(dir, "reference/digest/diff/etc/motd"), []byte("lazy"), 0o644))
	option := "overlay.additionallayerstore=" + dir + ":ref"
	n := newNode(t, synced, func(o *Options) { o.Options = append(o.Options, option) })
	if options := n.Info()["options"].([]string); slices.Contains(options, option) {
		t.Errorf("options: %q", options)
	}
	img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")

	// This is how the library makes such a layer. In the version that crius is built with
	// it forgets the record.
	diff := n.diff(n.chain(img)[0])
	ok(t, os.RemoveAll(diff))
	ok(t, os.WriteFile(filepath.Join(diff, "../additionallayer"), []byte(filepath.Join(dir, "reference/digest")), 0o600))
	ok(t, os.Symlink(filepath.Join(dir, "reference/digest/diff"), diff))

	listed := func(want int) {
		t.Helper()
		n.images.forget(img.ID)
		if list := n.list(); len(list) != want {
			t.Errorf("listed: %+v, want %d", list, want)
		}
	}
	n.cutPower(true, func() { ok(t, os.Rename(dir, dir+".not mounted")) })
	listed(0)
	ok(t, os.Rename(dir+".not mounted", dir))
	listed(1)
	for _, users := range []string{"", userNS(t, 100000)} {
		c := n.rootfs("c", img.ID)
		c.UserNS = users
		n.mount(c)
		if n.read(c, "etc/motd") != "lazy" {
			t.Error("wrong content")
		}
		n.removeRootfs(c)
	}
}

// A layer of an additional layer store is known by the digest of its table of contents, to
// which a manifest may attach any config: the image's layers are pulled and verified.
func TestPullBesideAdditionalLayerStore(t *testing.T) {
	t.Parallel()
	toc := digest.FromString("table of contents")
	a := motd(t, "pulled")
	a.Manifest = changedJSON(t, a.Manifest, func(m map[string]any) {
		top := m["layers"].([]any)[1].(map[string]any)
		top["annotations"] = map[string]any{"containerd.io/snapshot/stargz/toc.digest": toc}
	})
	r := serve(t, "app", "1", a)
	dir := t.TempDir()
	layer := filepath.Join(dir, base64.StdEncoding.EncodeToString([]byte(r.Addr()+"/app:1")), toc.String())
	ok(t, os.MkdirAll(filepath.Join(layer, "diff/etc"), 0o755))
	ok(t, os.WriteFile(filepath.Join(layer, "diff/etc/motd"), []byte("forged"), 0o644))
	ok(t, os.WriteFile(filepath.Join(layer, "info"), []byte(`{"toc-digest": "`+toc.String()+`"}`), 0o600))
	ok(t, os.WriteFile(filepath.Join(layer, "blob"), nil, 0o600))
	n := newNode(t, func(o *Options) { o.Options = append(o.Options, "overlay.additionallayerstore="+dir+":ref") })
	img := n.pull(r.Addr() + "/app:1")
	if img.ID != a.ID() {
		t.Errorf("image %s, want the digest of its config, %s", img.ID, a.ID())
	}
	c := n.rootfs("c", img.ID)
	n.mount(c)
	if got := n.read(c, "etc/motd"); got != "pulled" {
		t.Errorf("the container sees %q", got)
	}
	n.removeRootfs(c)
}
