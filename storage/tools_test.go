package storage

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
)

// skopeo runs Debian's skopeo, which brings its own, older copies of the
// libraries: whatever it can read and write, podman and buildah can.
func skopeo(t testing.TB, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command("skopeo", args...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// transport names an image in the node's store for another tool.
func (n *node) transport(name string) string {
	return fmt.Sprintf("containers-storage:[overlay@%s+%s]%s", n.cfg.Root, n.cfg.RunRoot, name)
}

func TestOtherToolsImageIsUsable(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := motd(t, "from skopeo")
	r := serve(t, "app", "1", a)
	n.list() // read before, so that the change has to be noticed
	if out, err := skopeo(t, "copy", "-q", "--src-tls-verify=false", "docker://"+r.Addr()+"/app:1", n.transport("example.org/app:2")); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	img, err := n.Image(testContext(t), "example.org/app:2")
	if err != nil || img.ID != a.ID() || !slices.Equal(img.RepoTags, []string{"example.org/app:2"}) {
		t.Fatalf("%+v, %v", img, err)
	}
	c := n.rootfs("c", img.ID)
	n.mount(c)
	if n.read(c, "etc/motd") != "from skopeo" {
		t.Error("wrong content")
	}

	// While a container uses it, no other tool gets it out of the way.
	out, err := skopeo(t, "delete", n.transport("example.org/app:2"))
	if err == nil || !strings.Contains(out, "in use by a container") {
		t.Errorf("skopeo delete: %v: %s", err, out)
	}
	if n.read(c, "etc/hostname") != "base\n" {
		t.Error("the container lost its image")
	}
	n.removeRootfs(c)
	if err := n.holds.expire(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	if out, err := skopeo(t, "delete", n.transport("example.org/app:2")); err != nil {
		t.Errorf("skopeo delete afterwards: %v: %s", err, out)
	}
	if images := n.list(); len(images) != 0 {
		t.Errorf("the deletion went unnoticed: %+v", images)
	}
	n.empty()
}

func TestOurImageIsUsableByOtherTools(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for name, a := range map[string]*image.Artifact{
		"oci":   motd(t, "oci"),
		"index": index(t, motd(t, "index")),
	} {
		r := serve(t, "app", name, a)
		img := n.pull(r.Addr() + "/app:" + name)
		dir := t.TempDir()
		out, err := skopeo(t, "copy", "-q", n.transport(img.RepoTags[0]), "dir:"+dir)
		if err != nil {
			t.Fatalf("%s: %v: %s", name, err, out)
		}
		if files := entriesOf(t, dir); !slices.Contains(files, img.ID) || len(files) != 5 { // config, 2 layers, manifest, version
			t.Errorf("%s: %q", name, files)
		}
		spec, err := n.Spec(testContext(t), img)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := skopeo(t, "inspect", n.transport("@"+img.ID)); err != nil || !strings.Contains(out, spec.RootFS.DiffIDs[0].String()[:7]) {
			t.Errorf("%s: %v: %s", name, err, out)
		}
		if out, err := skopeo(t, "delete", n.transport(img.RepoTags[0])); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
	n.empty()
}

// Images of a read-only store, as storage.conf may add, are used like others
// and cannot be removed.
func TestAdditionalImageStore(t *testing.T) {
	t.Parallel()
	a := motd(t, "shared")
	r := serve(t, "app", "1", a)
	dir := t.TempDir()
	shared := fmt.Sprintf("containers-storage:[overlay@%s+%s]example.org/app:1", filepath.Join(dir, "root"), filepath.Join(dir, "run"))
	if out, err := skopeo(t, "copy", "-q", "--src-tls-verify=false", "docker://"+r.Addr()+"/app:1", shared); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { unix.Unmount(filepath.Join(dir, "root/overlay"), unix.MNT_DETACH) }) // which skopeo leaves
	n := newNode(t, func(c *Options) { c.Options = append(c.Options, "overlay.imagestore="+filepath.Join(dir, "root")) })
	img, err := n.Image(testContext(t), "example.org/app:1")
	if err != nil || img.ID != a.ID() || !img.Pinned {
		t.Fatalf("%+v, %v", img, err)
	}
	c := n.rootfs("c", img.ID)
	n.mount(c)
	if n.read(c, "etc/motd") != "shared" {
		t.Error("wrong content")
	}
	n.removeRootfs(c)
	if err := n.Remove(testContext(t), img.ID); !errors.Is(err, fault.Precondition) {
		t.Errorf("%v", err)
	}
	if len(n.list()) != 1 {
		t.Error("the image is gone")
	}
	if images, _, err := n.FsInfo(testContext(t)); err != nil || images.UsedBytes > 64<<10 {
		t.Errorf("bytes of the other store are counted: %+v, %v", images, err)
	}
	// Pulled under another name, it has both, and stays when that is removed.
	name := r.Addr() + "/app:1"
	for _, pulled := range []*Image{n.pull(name), n.list()[0]} {
		if want := sorted([]string{name, "example.org/app:1"}); pulled.ID != img.ID || !slices.Equal(sorted(pulled.RepoTags), want) || !pulled.Pinned {
			t.Errorf("pulled under another name: %+v", pulled)
		}
	}
	n.remove(name)
	if list := n.list(); len(list) != 1 || list[0].ID != img.ID || !slices.Equal(list[0].RepoTags, []string{"example.org/app:1"}) {
		t.Errorf("after the removal: %+v", list)
	}
}

// A name means the image that was pulled last under it, even if an image of a read-only store has
// the name.
func TestNameInTwoStores(t *testing.T) {
	t.Parallel()
	records := []cstorage.Image{
		{ID: "new", Names: []string{"a:1"}},
		{ID: "old", Names: []string{"a:1", "a:0"}, ReadOnly: true},
		{ID: "new", Names: []string{"a:2"}, ReadOnly: true},
	}
	got := inAllStores(records)
	if len(got) != 2 || !slices.Equal(got[0].Names, []string{"a:1", "a:2"}) || !got[0].ReadOnly || !slices.Equal(got[1].Names, []string{"a:0"}) {
		t.Errorf("%+v", got)
	}
}

// twice lists all layers once more, as layers of a read-only store.
type twice struct{ cstorage.Store }

func (s twice) Layers() ([]cstorage.Layer, error) {
	layers, err := s.Store.Layers()
	for _, l := range layers {
		l.ReadOnly = true
		layers = append(layers, l)
	}
	return layers, err
}

// Layers of our own are verified after a boot, even if a read-only store has them.
func TestPowerCutOnLayerInTwoStores(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	img := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
	truncate(t, filepath.Join(n.diff(n.chain(img)[0]), "etc/motd"))
	if _, err := n.check(t.Context(), twice{n.store}); err != nil {
		t.Error(err)
	}
	if _, err := n.store.Image(img.ID); !errors.Is(err, cstorage.ErrImageUnknown) {
		t.Errorf("the damaged image: %v", err)
	}
}
