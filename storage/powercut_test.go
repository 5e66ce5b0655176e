package storage

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cstorage "go.podman.io/storage"
	drivers "go.podman.io/storage/drivers"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/test/kit/image"
)

// synced is for tests of the store manifest, which want the real thing.
func synced(c *Options) { c.Options = []string{"overlay.sync=filesystem"} }

// storeManifest is the store manifest as it is on the disk.
type storeManifest struct {
	Boot    string                     `json:"boot"`
	Records map[string]json.RawMessage `json:"records"`
	Images  string                     `json:"imagestore,omitempty"`
	Unsure  []layerID                  `json:"unsure,omitempty"`
	Whole   []layerID                  `json:"whole,omitempty"`
}

type layerID struct {
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
}

// Files in the graph root and, for the last, in the run root.
const (
	manifestFile = "crius-seal/store/seal.json"
	layersFile   = "overlay-layers/layers.json"
	settledFile  = "crius-settled"
)

func (n *node) manifests() *record.Dir[storeManifest] {
	n.t.Helper()
	dir := record.At[storeManifest](filepath.Join(n.cfg.Root, "crius-seal"), "seal.json", 1)
	ok(n.t, dir.Make())
	return dir
}

// stored is the manifest that the store has left.
func (n *node) stored() *storeManifest {
	n.t.Helper()
	last, err := n.manifests().Get("store")
	ok(n.t, err)
	return last
}

func (n *node) putManifest(m *storeManifest) {
	n.t.Helper()
	dir := n.manifests()
	ok(n.t, errors.Join(dir.Put(n.t.Context(), "store", m), dir.Sync()))
}

// bootAgain changes the manifest that the store has left, as if the machine had been
// booted since; forget: and as if nothing had been synced before the power failed.
func (n *node) bootAgain(forget bool) {
	n.t.Helper()
	last := n.stored()
	last.Boot = "the boot before"
	if forget {
		last.Records = nil
	}
	n.putManifest(last)
}

// check has a start after a boot check the store, which it sees through lib, without
// a manifest that lists anything.
func (n *node) check(ctx context.Context, lib cstorage.Store) (*durable.Manifest, error) {
	n.t.Helper()
	n.putManifest(&storeManifest{Boot: "the boot before"})
	m := durable.NewManifest(durable.Config{Roots: durable.Roots{Graph: n.cfg.Root, Run: n.cfg.RunRoot}, Sync: true, Reference: holdID})
	ok(n.t, m.Restore())
	return m, m.Check(ctx, lib)
}

// cutPower ends the store, lets damage happen and boots the machine.
func (n *node) cutPower(forget bool, damage func()) {
	n.t.Helper()
	if err := n.Close(context.Background()); err != nil {
		n.t.Fatal(err)
	}
	n.bootAgain(forget)
	ok(n.t, os.RemoveAll(filepath.Join(n.cfg.RunRoot, settledFile))) // as all below /run
	damage()
	// The library keeps the records that it has read until another process has written: this makes
	// it look like that.
	for _, root := range rootsOf(n.puller.Options).All() {
		locks, _ := filepath.Glob(filepath.Join(root, "overlay-*/*.lock"))
		for _, lock := range locks {
			ok(n.t, os.WriteFile(lock, random(64), 0o600))
		}
	}
	n.open()
}

// diff is the directory of a layer's files.
func (n *node) diff(id string) string { return filepath.Join(n.cfg.Root, "overlay", id, "diff") }

// chain are the layers of an image, top first.
func (n *node) chain(img *Image) []string {
	n.t.Helper()
	driverSetUp.Lock() // the store may be closed, which a look into it undoes
	defer driverSetUp.Unlock()
	var ids []string
	for id := img.topLayer; id != ""; {
		ids = append(ids, id)
		layer, err := n.store.Layer(id)
		if err != nil {
			n.t.Fatal(err)
		}
		id = layer.Parent
	}
	return ids
}

// unowned are the layers and images on the disk that have no record, files
// of records that are gone, and short names that no layer has.
func (n *node) unowned() []string {
	n.t.Helper()
	known := map[string]bool{}
	layers, err := n.store.Layers()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, l := range layers {
		known[l.ID] = true
	}
	images, err := n.store.Images()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, i := range images {
		known[i.ID] = true
	}
	var out []string
	for _, pattern := range []string{"overlay/*", "overlay-layers/*", "overlay-images/*"} {
		found, _ := filepath.Glob(filepath.Join(n.cfg.Root, pattern))
		for _, path := range found {
			if id, _, _ := strings.Cut(filepath.Base(path), "."); len(id) == 64 && !known[id] {
				out = append(out, path)
			}
		}
	}
	return append(out, shortNamesOfNone(n.t, n.cfg.Root)...)
}

// shortNamesOfNone are the links in a directory of the store for the kernel, except those that are written down in
// the directories of layers.
func shortNamesOfNone(t testing.TB, root string) []string {
	t.Helper()
	links, err := filepath.Glob(filepath.Join(root, "overlay/l/*"))
	ok(t, err)
	names, err := filepath.Glob(filepath.Join(root, "overlay/*/link"))
	ok(t, err)
	for _, name := range names {
		text, err := os.ReadFile(name)
		ok(t, err)
		links = slices.DeleteFunc(links, func(link string) bool { return filepath.Base(link) == string(text) })
	}
	return links
}

// A process that dies, or a power cut, just when the library makes a layer leaves a short name, of a layer that is
// removed or made anew; with an imagestore every removal of a layer does.
func TestShortNamesOfNone(t *testing.T) {
	t.Parallel()
	for _, place := range []func(*Options){func(*Options) {}, apart} {
		n := newNode(t, place)
		root := cmp.Or(n.cfg.ImageStore, n.cfg.Root)
		a := build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("a", "a"))}})
		r := serve(t, "app", "1", a)
		r.Push("other", "1", motd(t, "other"))
		img := n.pull(r.Addr() + "/app:1")
		names, err := filepath.Glob(filepath.Join(root, "overlay/l/*"))
		if err != nil || len(names) != 1 {
			t.Fatalf("short names %q, %v", names, err)
		}
		links := filepath.Join(root, "overlay/l")
		for name, to := range map[string]string{
			"GONE": "../" + strings.Repeat("0", 64) + "/diff", "SECOND": "../" + n.chain(img)[0] + "/diff", "foreign": "elsewhere",
		} {
			ok(t, os.Symlink(to, filepath.Join(links, name)))
		}
		ok(t, errors.Join(os.Mkdir(filepath.Join(links, "dir"), 0o700), os.WriteFile(filepath.Join(links, "link"), []byte("foreign2"), 0o600)))
		odd := filepath.Join(root, "overlay/odd") // of which nobody can say what it is
		ok(t, errors.Join(os.MkdirAll(filepath.Join(odd, "link"), 0o700), os.Symlink("../odd/diff", filepath.Join(links, "odd"))))
		n.restart()
		ok(t, n.Remove(t.Context(), n.pull(r.Addr()+"/other:1").ID))
		want := append(names, filepath.Join(links, "dir"), filepath.Join(links, "foreign"), filepath.Join(links, "link"), filepath.Join(links, "odd"))
		if left, err := filepath.Glob(filepath.Join(links, "*")); err != nil || !slices.Equal(left, want) {
			t.Errorf("left are %q, %v; want %q", left, err, want)
		}
		c := n.rootfs("c", img.ID)
		n.mount(c)
		n.removeRootfs(c)
	}
}

// What a power cut does to an image that was not on the disk as a whole is
// noticed at the next boot: that image is no longer listed, another one that
// shares a layer with it is, and when the kubelet pulls it again all is well.
// cri-o#4285, #5128, #7177, containerd#9115, #5854 (field note A2).
func TestPowerCutDamagesAnImage(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(n *node, top, base string, id string){
		"zero-length file":     func(n *node, top, _, _ string) { truncate(n.t, filepath.Join(n.diff(top), "bin/sh")) },
		"zeros in a file":      func(n *node, top, _, _ string) { zero(n.t, filepath.Join(n.diff(top), "bin/sh")) },
		"missing file":         func(n *node, top, _, _ string) { remove(n.t, filepath.Join(n.diff(top), "bin/sh")) },
		"missing symlink":      func(n *node, top, _, _ string) { remove(n.t, filepath.Join(n.diff(top), "bin/link")) },
		"missing directory":    func(n *node, top, _, _ string) { remove(n.t, filepath.Join(n.diff(top), "bin/empty")) },
		"missing whiteout":     func(n *node, top, _, _ string) { remove(n.t, filepath.Join(n.diff(top), "etc/hostname")) },
		"mode not set":         func(n *node, top, _, _ string) { chmod(n.t, filepath.Join(n.diff(top), "bin/sh")) },
		"directory not opaque": func(n *node, top, _, _ string) { seeThrough(n.t, filepath.Join(n.diff(top), "opaque")) },
		"empty diff":           func(n *node, top, _, _ string) { remove(n.t, n.diff(top)); mkdir(n.t, n.diff(top)) },
		"missing diff":         func(n *node, top, _, _ string) { remove(n.t, n.diff(top)) },
		"missing layer":        func(n *node, top, _, _ string) { remove(n.t, filepath.Dir(n.diff(top))) },
		"missing short name":   func(n *node, top, _, _ string) { n.loseShortName(top) },
		"missing lower":        func(n *node, top, _, _ string) { remove(n.t, filepath.Join(filepath.Dir(n.diff(top)), "lower")) },
		"empty lower":          func(n *node, top, _, _ string) { truncate(n.t, filepath.Join(filepath.Dir(n.diff(top)), "lower")) },
		"missing description":  func(n *node, top, _, _ string) { remove(n.t, n.tarSplit(top)) },
		"empty description":    func(n *node, top, _, _ string) { truncate(n.t, n.tarSplit(top)) },
		"missing data": func(n *node, _, _, id string) {
			remove(n.t, filepath.Join(n.cfg.Root, "overlay-images", id, "manifest"))
		},
		"empty data": func(n *node, _, _, id string) {
			truncate(n.t, filepath.Join(n.cfg.Root, "overlay-images", id, "manifest"))
		},
		"all data": func(n *node, _, _, id string) { remove(n.t, filepath.Join(n.cfg.Root, "overlay-images", id)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			base := layer(t, image.Dir("etc"), image.Text("etc/hostname", "base\n"), image.Dir("opaque"), image.Text("opaque/hidden", "x"))
			top := layer(t, image.Dir("bin"), image.Regular("bin/sh", 0o755, random(5000)), image.Symlink("bin/link", "sh"), image.Dir("bin/empty"),
				image.Whiteout("etc/hostname"), image.Dir("opaque"), image.Opaque("opaque"))
			r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{base, top}}))
			r.Push("other", "1", build(t, image.Image{Layers: []image.Layer{base}}))
			img, other := n.pull(r.Addr()+"/app:1"), n.pull(r.Addr()+"/other:1")
			c := n.rootfs("c", img.ID)
			n.mount(c)
			if err := n.UnmountRootfs(c); err != nil { // a power cut unmounts, too
				t.Fatal(err)
			}
			chain := n.chain(img)
			n.cutPower(true, func() { damage(n, chain[0], chain[1], img.ID) })
			if images := n.list(); len(images) != 1 || images[0].ID != other.ID {
				t.Fatalf("after the cut there are %+v", images)
			}
			if err := n.Adopt(t.Context(), []Rootfs{c}); err == nil {
				t.Error("the container's image is not missed")
			}
			if left := n.unowned(); len(left) > 0 {
				t.Errorf("left over: %q", left)
			}
			again := n.pull(r.Addr() + "/app:1")
			if again.ID != img.ID {
				t.Errorf("pulled %s again, and got %s", img.ID, again.ID)
			}
			d := n.rootfs("d", img.ID)
			n.mount(d)
			if got := n.read(d, "bin/sh"); len(got) != 5000 {
				t.Errorf("the program has %d bytes", len(got))
			}
			if _, err := os.Stat(filepath.Join(d.Target, "etc/hostname")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a file that the image hides: %v", err)
			}
			if err := n.RemoveRootfs(testContext(t), c); err != nil {
				t.Error(err)
			}
			n.removeRootfs(d)
		})
	}
}

func (n *node) tarSplit(id string) string {
	return filepath.Join(n.cfg.Root, "overlay-layers", id+".tar-split.gz")
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func truncate(t testing.TB, path string) { t.Helper(); ok(t, os.Truncate(path, 0)) }
func mkdir(t testing.TB, path string)    { t.Helper(); ok(t, os.Mkdir(path, 0o755)) }
func chmod(t testing.TB, path string)    { t.Helper(); ok(t, os.Chmod(path, 0o600)) }

func remove(t testing.TB, path string) {
	t.Helper()
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
	ok(t, os.RemoveAll(path))
}

func zero(t testing.TB, path string) {
	t.Helper()
	info, err := os.Stat(path)
	ok(t, err)
	ok(t, os.WriteFile(path, make([]byte, info.Size()), 0o600))
}

func seeThrough(t testing.TB, dir string) {
	t.Helper()
	ok(t, unix.Lremovexattr(dir, "trusted.overlay.opaque"))
}

// An image that is whole is never taken for a damaged one, whatever its layers are
// like.
func TestSoundLayersAreKept(t *testing.T) {
	t.Parallel()
	var archive bytes.Buffer // as git writes one
	w := tar.NewWriter(&archive)
	ok(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}}))
	ok(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "global", Mode: 0o600}))
	ok(t, w.Close())
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{
		image.RawLayer(archive.Bytes()),
		layer(t, image.Dir("."), image.Dir("d").Owned(5, 6), image.Text("d/gone", "x"), image.Text("/absolute", "y"), image.Text("./dot", "z")),
		layer(t,
			image.Regular("d/own", 0o4751, random(100)).Owned(7, 8), image.Hardlink("d/link", "d/own"), // is root's
			image.Whiteout("d/gone"), image.Text("without/a/directory", "x"),
			image.Symlink("lib", "/usr/lib"), image.Dir("usr"), image.Dir("usr/lib"), image.Text("lib/through", "x"),
			image.Device("d/null", 1, 3), image.Symlink("d/nowhere", "../../nowhere").Owned(9, 9)),
		layer(t, image.Dir("d"), image.Opaque("d"), image.Text("d/new", "")),
	}}))
	for range 2 {
		n.cutPower(true, func() {})
		if images := n.list(); len(images) != 1 || images[0].ID != img.ID {
			t.Fatalf("%+v", images)
		}
	}
}

// After a boot, layers that were synced are trusted and not read: having many images takes no time.
func TestLayersInTheManifestAreNotRead(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "1", motd(t, "x"))
	img := n.pull(r.Addr() + "/app:1")
	file := filepath.Join(n.diff(n.chain(img)[0]), "etc/motd")
	read := func() time.Time {
		var st unix.Stat_t
		ok(t, unix.Stat(file, &st))
		return time.Unix(st.Atim.Unix())
	}
	old := time.Now().Add(-100 * time.Hour)
	old = old.Truncate(time.Second)
	for _, listed := range []bool{true, false} {
		n.cutPower(!listed, func() { ok(t, os.Chtimes(file, old, time.Time{})) })
		if images := n.list(); len(images) != 1 || images[0].ID != img.ID {
			t.Fatalf("listed %v: %+v", listed, images)
		}
		if untouched := read().Equal(old); untouched != listed {
			t.Errorf("listed %v: its file was read at %v", listed, read())
		}
	}
}

// A layer that was deleted and pulled again is another one: that the first was on
// the disk says nothing of the second.
func TestManifestIsOfOneLifeOfALayer(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "1", motd(t, "x"))
	img := n.pull(r.Addr() + "/app:1")
	top := n.chain(img)[0]
	n.remove(img.ID)
	if out, err := skopeo(t, "copy", "-q", "--src-tls-verify=false", "docker://"+r.Addr()+"/app:1", n.transport("example.org/app:2")); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	last := n.stored() // the manifest of the first pull, which is before skopeo's
	ok(t, n.Close(t.Context()))
	last.Boot = "another"
	n.putManifest(last)
	truncate(t, filepath.Join(n.diff(top), "etc/motd"))
	n.open()
	if images := n.list(); len(images) != 0 {
		t.Errorf("a damaged image is listed: %+v", images)
	}
	n.pull(r.Addr() + "/app:1")
}

// Records of containers/storage that a power cut has spoiled are set aside, and
// the last manifest's take their place: nothing is lost that was on the disk, and
// nobody has to come (cri-o#5015, #9163: never wipe).
func TestDamagedRecordsAreSetAside(t *testing.T) {
	t.Parallel()
	for i, file := range []string{layersFile, "overlay-images/images.json", "overlay-containers/containers.json"} {
		for what, bad := range map[string]string{"empty": "", "cut": `[{"id":"abc`, "zeros": strings.Repeat("\x00", 100), "other": `{"a":1}`} {
			for _, forget := range []bool{false, true} {
				if forget && what != "empty" {
					continue // what was in it makes no difference then
				}
				t.Run(fmt.Sprint(i, what, forget), func(t *testing.T) {
					t.Parallel()
					n := newNode(t, synced)
					r := serve(t, "app", "1", motd(t, "precious"))
					img := n.pull(r.Addr() + "/app:1")
					c := n.rootfs("c", img.ID)
					n.mount(c) // makes a container record
					ok(t, n.UnmountRootfs(c))
					path := filepath.Join(n.cfg.Root, file)
					n.cutPower(forget, func() { ok(t, os.WriteFile(path, []byte(bad), 0o600)) })
					lost := forget && !strings.HasSuffix(file, "containers.json")
					if images := n.list(); len(images) == 1 == lost {
						t.Errorf("images: %+v", images)
					}
					if aside, err := os.ReadFile(path + ".damaged"); err != nil || string(aside) != bad {
						t.Errorf("the damaged file is now %q, %v", aside, err)
					}
					if left := n.unowned(); len(left) > 0 && !lost && file != layersFile { // else the hold's is, for one
						t.Errorf("left over: %q", left)
					}
					n.pull(r.Addr() + "/app:1")
					d := n.rootfs("d", img.ID)
					n.mount(d)
					if n.read(d, "etc/motd") != "precious" {
						t.Error("wrong content")
					}
					n.removeRootfs(d)
					ok(t, n.RemoveRootfs(testContext(t), c))
				})
			}
		}
	}
}

// While a record file is moved aside, a layer without a record may belong to another tool's
// container, which exists nowhere else: it stays, through boots, pulls and verification, until a
// person has deleted the file.
func TestOthersContainersOutliveDamagedRecords(t *testing.T) {
	t.Parallel()
	for i, file := range []string{layersFile, "overlay-images/images.json", "overlay-containers/containers.json"} {
		for _, forget := range []bool{false, true} { // the last manifest
			t.Run(fmt.Sprint(i, forget), func(t *testing.T) {
				t.Parallel()
				n := newNode(t, synced)
				r := serve(t, "app", "1", motd(t, "precious"))
				img := n.pull(r.Addr() + "/app:1")
				foreign, err := n.store.CreateContainer("", []string{"theirs"}, img.ID, "", "", nil)
				ok(t, err)
				mine := filepath.Join(n.diff(foreign.LayerID), "data")
				ok(t, os.WriteFile(mine, []byte("x"), 0o600))
				userdata, err := n.store.ContainerDirectory(foreign.ID)
				ok(t, err)
				ok(t, os.WriteFile(filepath.Join(userdata, "config"), []byte("x"), 0o600))
				path := filepath.Join(n.cfg.Root, file)
				n.cutPower(forget, func() { ok(t, os.WriteFile(path, nil, 0o600)) })
				kept := func(when string) {
					t.Helper()
					for _, file := range []string{mine, filepath.Join(userdata, "config")} {
						if _, err := os.Stat(file); err != nil {
							t.Errorf("%s: %v", when, err)
						}
					}
				}
				kept("after the boot")
				n.leftovers.OrphanAge = time.Nanosecond
				defects, err := n.Verify(testContext(t), nil)
				ok(t, err)
				if !slices.ContainsFunc(defects, func(d Defect) bool {
					return strings.Contains(d.Object, path+durable.DamagedSuffix) && d.Mend == nil && d.Minor && strings.Contains(d.Advice, "rm "+path)
				}) {
					t.Errorf("verify does not name the file: %+v", defects)
				}
				for _, d := range defects {
					if d.Mend == nil {
						continue
					}
					if err := d.Mend(testContext(t)); err != nil && !errors.Is(err, fault.Precondition) { // their container has the image
						t.Errorf("%s: %v", d.Text, err)
					}
				}
				kept("after the repair")
				n.pull(r.Addr() + "/app:1")
				n.cutPower(false, func() {})
				kept("after another boot")
				remove(t, path+durable.DamagedSuffix)
				n.cutPower(false, func() {})
				if file == layersFile {
					if _, err := os.Stat(mine); !errors.Is(err, os.ErrNotExist) {
						t.Errorf("a layer without a record, when it is allowed: %v", err)
					}
				}
			})
		}
	}
}

// unreadable is a store that runs out of something when layers are read, after their directories
// were found.
type unreadable struct {
	cstorage.Store
	err    error
	looked map[string]bool
}

func (u unreadable) GraphDriver() (drivers.Driver, error) {
	driver, err := u.Store.GraphDriver()
	return unreadableDriver{driver, u}, err
}

type unreadableDriver struct {
	drivers.Driver
	store unreadable
}

func (d unreadableDriver) Metadata(id string) (map[string]string, error) {
	if d.store.looked[id] {
		return nil, d.store.err
	}
	d.store.looked[id] = true
	return d.Driver.Metadata(id)
}

// What could not be read is not damaged: the image stays, and is read at the next
// boot, whatever manifest is written meanwhile.
func TestUnreadableImagesAreKept(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "1", motd(t, "x"))
	img := n.pull(r.Addr() + "/app:1")
	top := n.chain(img)[0]
	for _, err := range []error{unix.EMFILE, unix.ENOMEM, unix.EIO} {
		m, failed := n.check(t.Context(), unreadable{n.store, &os.PathError{Op: "open", Path: "x", Err: err}, map[string]bool{}})
		ok(t, errors.Join(failed, m.Write(t.Context())))
		unsure := n.stored().Unsure
		if images := n.list(); len(images) != 1 || len(unsure) != len(n.chain(img)) {
			t.Fatalf("%v: images %+v, unsure %+v", err, images, unsure)
		}
		n.manifest = m
	}
	data := filepath.Join(n.cfg.Root, "overlay-images", img.ID, "manifest")
	ok(t, os.Rename(data, data+".away"))
	ok(t, os.Symlink("manifest", data)) // neither there nor not there
	_, err := n.check(t.Context(), n.store)
	ok(t, err)
	ok(t, os.Remove(data))
	ok(t, os.Rename(data+".away", data))
	if images := n.list(); len(images) != 1 {
		t.Fatalf("a manifest that cannot be read: %+v", images)
	}
	ok(t, n.manifest.Write(t.Context()))
	n.cutPower(false, func() { truncate(t, filepath.Join(n.diff(top), "etc/motd")) })
	if images := n.list(); len(images) != 0 {
		t.Errorf("a layer that nobody could read is in the manifest: %+v", images)
	}
}

// An image that was made on this machine is in no registry: a person decides.
func TestDamagedLocalImageIsKept(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "1", motd(t, "x"))
	img := n.pull(r.Addr() + "/app:1")
	top := n.chain(img)[0]
	for i, names := range [][]string{{"localhost/built:latest"}, nil} {
		local, err := n.store.CreateImage(digestOf(fmt.Sprint("built", i)), names, top, "", nil)
		ok(t, err)
		n.cutPower(i == 0, func() { truncate(t, filepath.Join(n.diff(top), "etc/motd")) })
		if _, err := n.store.Image(local.ID); err != nil {
			t.Errorf("image with the names %q: %v", names, err)
		}
	}
	if _, err := n.store.Image(img.ID); !errors.Is(err, cstorage.ErrImageUnknown) {
		t.Errorf("the pulled image: %v", err)
	}
}

// A start that is called off during the post-crash check ends, and deletes nothing.
func TestPostCrashCheckEndsWithItsContext(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	truncate(t, filepath.Join(n.diff(n.chain(img)[0]), "etc/motd"))
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("told to stop")
	cancel(stop)
	if _, err := n.check(ctx, n.store); !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
	if images := n.list(); len(images) != 1 {
		t.Errorf("images: %+v", images)
	}
}

// A layer that was being made when the power failed is deleted after the boot, with or without a
// record, and so are staged and downloaded files.
func TestHalfMadeLayersGo(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "1", motd(t, "x"))
	img := n.pull(r.Addr() + "/app:1")
	id := digestOf("half")
	n.cutPower(false, func() {
		ok(t, os.MkdirAll(filepath.Join(n.diff(id), "bin"), 0o755))
		ok(t, os.WriteFile(n.tarSplit(digestOf("other half")), []byte("x"), 0o600))
		for _, dir := range []string{"overlay-layers", "overlay-images", "overlay-images/" + img.ID, "overlay-containers"} {
			ok(t, os.WriteFile(filepath.Join(n.cfg.Root, dir, ".tmp-layers.json3965451597"), []byte("[{"), 0o600))
		}
		for _, file := range []string{layersFile, manifestFile} { // by package idlists
			file = filepath.Join(n.cfg.Root, file)
			ok(t, os.WriteFile(filepath.Join(filepath.Dir(file), ".tmp-"+filepath.Base(file)), []byte("[{"), 0o600))
		}
		half := digestOf("with a record")
		ok(t, os.MkdirAll(n.diff(half), 0o755))
		n.editLayers(func(layers []map[string]any) []map[string]any {
			for i := range 4 { // the library must not lose its place while it deletes them (podman#24743)
				layers = append(layers, incompleteLayer(digestOf(fmt.Sprint("without files", i))))
			}
			return append(layers, incompleteLayer(half))
		})
	})
	if left := n.unowned(); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
	for _, pattern := range []string{"*/.tmp-*", "*/*/.tmp-*"} {
		if found, _ := filepath.Glob(filepath.Join(n.cfg.Root, pattern)); len(found) > 0 {
			t.Errorf("left over: %q", found)
		}
	}
	layers, err := n.store.Layers()
	ok(t, err)
	if len(layers) != 2 {
		t.Errorf("there are %d layers", len(layers))
	}
	if images := n.list(); !slices.ContainsFunc(images, func(i *Image) bool { return i.ID == img.ID }) {
		t.Errorf("images: %+v", images)
	}
}

// The manifest itself may be lost: then everything is read once.
func TestDamagedManifest(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "1", motd(t, "x"))
	img := n.pull(r.Addr() + "/app:1")
	file := filepath.Join(n.cfg.Root, manifestFile)
	n.cutPower(false, func() { truncate(t, file) })
	if images := n.list(); len(images) != 1 || images[0].ID != img.ID {
		t.Errorf("%+v", images)
	}
	n.cutPower(false, func() { truncate(t, filepath.Join(n.diff(n.chain(img)[0]), "etc/motd")); truncate(t, file) })
	if images := n.list(); len(images) != 0 {
		t.Errorf("a damaged image is listed: %+v", images)
	}

	// So it is when the start that has set it aside got no further.
	img = n.pull(r.Addr() + "/app:1")
	n.cutPower(false, func() { truncate(t, filepath.Join(n.diff(n.chain(img)[0]), "etc/motd")); ok(t, os.Remove(file)) })
	if images := n.list(); len(images) != 0 {
		t.Errorf("a damaged image is listed: %+v", images)
	}
}

// A manifest that is damaged while the node is up says nothing against images on which
// containers run: nothing is looked through, nothing deleted. Nor does the next
// boot trust them.
func TestDamagedManifestWhileTheNodeIsUp(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "1", motd(t, "x"))
	img := n.pull(r.Addr() + "/app:1")
	c := n.rootfs("c", img.ID)
	n.mount(c)
	ok(t, n.Close(t.Context()))
	truncate(t, filepath.Join(n.cfg.Root, manifestFile))
	motd := filepath.Join(n.diff(n.chainOf(img)[0]), "etc/motd")
	whole, err := os.ReadFile(motd)
	ok(t, err)
	truncate(t, motd) // what a post-crash check would condemn the image for
	n.open()
	ok(t, n.Adopt(t.Context(), []Rootfs{c}))
	if images := n.list(); len(images) != 1 || images[0].ID != img.ID {
		t.Errorf("%+v", images)
	}
	if _, err := n.store.Container(holdID(img.ID)); err != nil {
		t.Errorf("the hold of the image: %v", err)
	}
	ok(t, os.WriteFile(motd, whole, 0o644))
	n.removeRootfs(c)
	n.cutPower(false, func() {})
	if images := n.list(); len(images) != 1 {
		t.Errorf("a sound image after a boot: %+v", images)
	}
	ok(t, n.Close(t.Context()))
	truncate(t, filepath.Join(n.cfg.Root, manifestFile))
	n.open()
	n.cutPower(false, func() { truncate(t, motd) })
	if images := n.list(); len(images) != 0 {
		t.Errorf("a damaged image is listed: %+v", images)
	}
}

// chainOf is chain for a store that is closed.
func (n *node) chainOf(img *Image) []string {
	n.t.Helper()
	n.open()
	defer n.Close(context.Background())
	return n.chain(img)
}

// A layer that a post-crash check could not vouch for stays unsure through restarts and the
// manifests of later pulls, until one has read it.
func TestUnsureLayersOutliveARestart(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "1", motd(t, "x"))
	img := n.pull(r.Addr() + "/app:1")
	top := n.chain(img)[0]
	m, err := n.check(t.Context(), unreadable{n.store, &os.PathError{Op: "open", Path: "x", Err: unix.EIO}, map[string]bool{}})
	ok(t, err)
	n.manifest = m
	ok(t, n.manifest.Write(t.Context()))
	for i := range 2 {
		n.restart()
		r.Push("app", fmt.Sprint("later", i), build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("later", fmt.Sprint(i)))}}))
		n.pull(fmt.Sprint(r.Addr(), "/app:later", i))
	}
	n.cutPower(false, func() { truncate(t, filepath.Join(n.diff(top), "etc/motd")) })
	if images := n.list(); len(images) != 2 || slices.ContainsFunc(images, func(i *Image) bool { return i.ID == img.ID }) {
		t.Errorf("after the boot there are %+v", images)
	}
}

// A post-crash check that is interrupted continues where it was, however often, and reports that it
// is at work.
func TestInterruptedPostCrashCheckIsResumed(t *testing.T) {
	t.Parallel()
	n := newNode(t, synced)
	r := serve(t, "app", "0", motd(t, "0"))
	files := map[string]string{} // of a layer of each image
	const many = 4
	for i := range many {
		r.Push("app", fmt.Sprint(i), motd(t, fmt.Sprint(i)))
		top := n.chain(n.pull(fmt.Sprint(r.Addr(), "/app:", i)))[0]
		files[top] = filepath.Join(n.diff(top), "etc/motd")
	}
	ok(t, n.Close(t.Context()))
	n.bootAgain(true)
	old := time.Now().Add(-100 * time.Hour).Truncate(time.Second)
	for _, file := range files {
		ok(t, os.Chtimes(file, old, time.Time{}))
	}
	read := func() (list []string) {
		for top, file := range files {
			var st unix.Stat_t
			ok(t, unix.Stat(file, &st))
			if !time.Unix(st.Atim.Unix()).Equal(old) {
				ok(t, os.Chtimes(file, old, time.Time{}))
				list = append(list, top)
			}
		}
		return list
	}
	seen := map[string]int{}
	opens := 0
	for done := false; !done; opens++ {
		ctx, cancel := context.WithCancel(t.Context())
		before := len(n.whole())
		n.cfg.CheckProgress = func() {
			if len(n.whole()) > before { // it is at the next layer
				cancel()
			}
		}
		ok(t, os.RemoveAll(filepath.Join(n.cfg.RunRoot, settledFile)))
		driverSetUp.Lock()
		store, err := Open(ctx, n.cfg)
		driverSetUp.Unlock()
		cancel()
		if done = err == nil; done {
			n.Store = store
		} else if !errors.Is(err, context.Canceled) || opens > 4*many {
			t.Fatal(err)
		}
		kept := n.whole()
		for _, top := range read() {
			if done || slices.ContainsFunc(kept, func(l layerID) bool { return l.ID == top }) {
				seen[top]++
			}
		}
	}
	if opens < many {
		t.Errorf("it was never cut: %d starts", opens)
	}
	for top := range files {
		if seen[top] != 1 {
			t.Errorf("layer %s was read %d times", top, seen[top])
		}
	}
	if images := n.list(); len(images) != many {
		t.Errorf("there are %d images", len(images))
	}
	if left := n.whole(); len(left) > 0 {
		t.Errorf("the manifest still speaks of %d layers", len(left))
	}
}

// whole returns the layers that interrupted checks have found to be whole.
func (n *node) whole() []layerID {
	n.t.Helper()
	return n.stored().Whole
}

// A store that crius leaves has nothing of it any more.
func TestForget(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	n.remove(img.ID)
	ok(t, n.Adopt(t.Context(), nil))
	ok(t, n.Forget())
	for _, pattern := range []string{"crius*", ".crius*"} {
		if left, _ := filepath.Glob(filepath.Join(n.cfg.Root, pattern)); len(left) > 0 {
			t.Errorf("left over: %q", left)
		}
	}
}

// A layer in which an entry replaces a file cannot be put together again: that is no damage, and a check at
// each boot would find nothing else.
func TestReplacedFilesAreNoDamage(t *testing.T) {
	t.Parallel()
	for what, files := range map[string][]image.File{
		"file twice":          {image.Text("file", "first"), image.Text("./file", "content")},
		"file over directory": {image.Dir("a"), image.Text("a/gone", "x"), image.Text("a", "content")},
		"link over directory": {image.Dir("d"), image.Text("l/gone", "x"), image.Symlink("l", "d")},
		"empty directory":     {image.Dir("a"), image.Dir("a/b"), image.Text("a", "content")},
	} {
		n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{layer(t, files...)}}))
		for range 2 {
			n.cutPower(true, func() {})
			if _, err := n.Image(testContext(t), img.ID); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		if unsure := n.stored().Unsure; len(unsure) > 0 {
			t.Errorf("%s: checked again at the next boot: %v", what, unsure)
		}
	}
}
