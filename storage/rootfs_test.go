package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/owner"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/durable"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/wait"
)

// pulled is a node with one image.
func pulled(t testing.TB, a *image.Artifact) (*node, *Image) {
	t.Helper()
	n := newNode(t)
	return n, n.pull(serve(t, "app", "1", a).Addr() + "/app:1")
}

// An image volume shows the image's files and takes none, whatever the number
// of its layers.
func TestImageVolume(t *testing.T) {
	t.Parallel()
	text := func(name string) image.Layer { return layer(t, image.Text(name, name)) }
	for _, layers := range [][]image.Layer{nil, {text("a")}, {text("a"), text("b")}, {text("a"), text("b"), text("c")}} {
		n, img := pulled(t, build(t, image.Image{Layers: layers}))
		for _, users := range []string{"", userNS(t, 100000)} {
			r := n.rootfs("volume", img.ID)
			r.ReadOnly, r.UserNS = true, users
			n.mount(r)
			n.mount(r)
			names := entriesOf(t, r.Target)
			if len(names) != len(layers) {
				t.Errorf("%d layers: %q", len(layers), names)
			}
			if len(layers) > 0 && n.read(r, "a") != "a" {
				t.Errorf("%d layers: content", len(layers))
			}
			if users != "" {
				checkOwner(t, r.Target, 100000, 100000)
			}
			if err := os.WriteFile(filepath.Join(r.Target, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
				t.Errorf("%d layers: writing: %v", len(layers), err)
			}
			n.removeRootfs(r)
			if left, _ := os.ReadDir(r.Dir); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		}
	}
}

func TestRootfs(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{
		layer(t, image.Dir("etc"), image.Text("etc/passwd", "root\n"), image.Text("etc/gone", "x"), image.Dir("var"), image.Text("var/old", "x"),
			image.Regular("su", 0o4755, []byte("#!"))),
		layer(t, image.Text("etc/passwd", "root\nnobody\n"), image.Whiteout("etc/gone"), image.Opaque("var"), image.Text("var/new", "y")),
	}}))
	a, b := n.rootfs("a", img.ID), n.rootfs("b", img.ID)
	n.mount(a)
	n.mount(b)
	if got := n.read(a, "etc/passwd"); got != "root\nnobody\n" {
		t.Errorf("passwd %q", got)
	}
	for _, gone := range []string{"etc/gone", "var/old"} {
		if _, err := os.Lstat(filepath.Join(a.Target, gone)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", gone, err)
		}
	}
	if st, err := os.Stat(filepath.Join(a.Target, "su")); err != nil || st.Mode()&os.ModeSetuid == 0 {
		t.Errorf("setuid file: %v, %v", st, err)
	}

	// Each has its own writable layer; it outlives an unmount.
	if err := os.WriteFile(filepath.Join(a.Target, "etc/mine"), []byte("a"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(b.Target, "etc/mine")); err == nil {
		t.Error("b sees a's file")
	}
	n.mount(a) // once more changes nothing
	if mounts := mountsBelow(t, filepath.Dir(a.Target)); len(mounts) != 1 {
		t.Errorf("mounted %d times", len(mounts))
	}
	for range 2 {
		if err := n.UnmountRootfs(a); err != nil {
			t.Fatal(err)
		}
	}
	n.mount(a)
	if n.read(a, "etc/mine") != "a" {
		t.Error("the writable layer was lost")
	}
	n.removeRootfs(a)
	n.removeRootfs(a)
	if left := entriesOf(t, a.Dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if n.read(b, "etc/passwd") == "" {
		t.Error("b suffered")
	}
	n.removeRootfs(b)
	n.remove(img.ID)
	n.empty()
}

// The root directory of the container has the owner and mode of the image's.
func TestRootfsHasTheImagesRootDirectory(t *testing.T) {
	t.Parallel()
	root := image.Dir(".")
	root.Mode, root.Uid, root.Gid = 0o750, 7, 8
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{layer(t, root), layer(t, image.Text("a", "b"))}}))
	r := n.rootfs("c", img.ID)
	n.mount(r)
	defer n.removeRootfs(r)
	var st unix.Stat_t
	if err := unix.Stat(r.Target, &st); err != nil || st.Mode&0o7777 != 0o750 || st.Uid != 7 || st.Gid != 8 {
		t.Errorf("mode %o, owner %d:%d, %v", st.Mode&0o7777, st.Uid, st.Gid, err)
	}
}

func TestRootfsOfImageWithoutLayers(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{}))
	r := n.rootfs("c", img.ID)
	n.mount(r)
	if err := os.WriteFile(filepath.Join(r.Target, "file"), nil, 0o600); err != nil {
		t.Error(err)
	}
	n.removeRootfs(r)
	if left := entriesOf(t, r.Dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestMountRootfsErrors(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	for what, test := range map[string]struct {
		change func(*Rootfs)
		want   error
	}{
		"no id":           {func(r *Rootfs) { r.ID = "" }, fault.Invalid},
		"relative target": {func(r *Rootfs) { r.Target = "a" }, fault.Invalid},
		"relative dir":    {func(r *Rootfs) { r.Dir = "" }, fault.Invalid},
		"unknown image":   {func(r *Rootfs) { r.ImageID = strings.Repeat("0", 64) }, fault.NotFound},
		"part of an id":   {func(r *Rootfs) { r.ImageID = r.ImageID[:12] }, fault.Invalid},
		"a name":          {func(r *Rootfs) { r.ImageID = img.RepoTags[0] }, fault.Invalid},
		"target no dir":   {func(r *Rootfs) { r.Target = "/dev/null/x" }, unix.ENOTDIR},
	} {
		r := n.rootfs(what, img.ID)
		test.change(&r)
		if err := n.MountRootfs(testContext(t), r); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", what, err, test.want)
		}
		if r.Target != "/dev/null/x" && filepath.IsAbs(r.Target) {
			n.removeRootfs(r)
		}
	}
	if err := n.holds.drop(t.Context(), img.ID, digestOf("target no dir")); err != nil {
		t.Fatal(err)
	}
	n.remove(img.ID)
	n.empty()
}

// If a layer vanishes on a running node, the kubelet sees that the image is gone, and pulls it
// again.
func TestMountOfLostLayer(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	dirs, err := durable.UsableLayers(n.store, img.topLayer)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dirs[1]); err != nil {
		t.Fatal(err)
	}
	r := n.rootfs("c", img.ID)
	if err := n.MountRootfs(testContext(t), r); !errors.Is(err, fault.NotFound) {
		t.Errorf("%v", err)
	}
	if len(n.list()) > 0 {
		t.Error("the image is still listed")
	}
	n.removeRootfs(r)
	n.pull(img.RepoTags[0])
	n.mount(r)
	n.removeRootfs(r)
	n.remove(img.ID)
	n.empty()
}

// The layers are made without a pull, which takes its time with so many.
func TestManyLayers(t *testing.T) {
	t.Parallel()
	const layers = 120
	n := newNode(t)
	top := ""
	for i := range layers {
		l, err := n.store.CreateLayer("", top, nil, "", false, nil)
		if err != nil {
			t.Fatal(err)
		}
		top = l.ID
		for name, content := range map[string]string{fmt.Sprintf("file%d", i): "own", "top": fmt.Sprint(i)} {
			if err := os.WriteFile(filepath.Join(n.cfg.Root, "overlay", top, "diff", name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	record, err := n.store.CreateImage("", nil, top, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	r := n.rootfs("c", record.ID)
	n.mount(r)
	if n.read(r, "file0") != "own" || n.read(r, "file119") != "own" || n.read(r, "top") != "119" {
		t.Error("layers are missing or out of order")
	}
	n.removeRootfs(r)
	if err := n.holds.remove(t.Context(), record.ID); err != nil {
		t.Fatal(err)
	}
	n.empty()
}

func TestStackedAndBusyMountsAreUnmounted(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	r := n.rootfs("c", img.ID)
	n.mount(r)
	for range 3 {
		if err := unix.Mount("tmpfs", r.Target, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	busy, err := os.Create(filepath.Join(r.Target, "open")) // keeps the topmost busy
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	n.removeRootfs(r)
	checkMounts(t, filepath.Join(n.dir, "containers"))
}

// keepsInUse checks that an image or artifact is not removed, by whatever reference, since one of a
// number of containers uses it, and stays listed with its names.
func (n *node) keepsInUse(id string, number int, container Rootfs) {
	n.t.Helper()
	before := byID(n.list(), id)
	if before == nil {
		n.t.Fatalf("image %s is not listed", id)
	}
	text := "in use by container " + container.ID[:64]
	if number > 1 {
		text = fmt.Sprintf(" and %d more", number-1)
	}
	for _, ref := range append([]string{id, id[:12]}, before.RepoTags...) {
		if err := n.Remove(testContext(n.t), ref); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), text) {
			n.t.Errorf("removing %s: %v", ref, err)
		}
	}
	if after := byID(n.list(), id); after == nil || !slices.Equal(after.RepoTags, before.RepoTags) || !slices.Equal(after.RepoDigests, before.RepoDigests) {
		n.t.Errorf("after attempts to remove it: %+v", after)
	}
}

// An image stays as long as a container or one of its volumes uses it, so that another container of
// it can be made.
func TestImageInUseIsNotRemoved(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "in use"))
	a, b := n.rootfs("a", img.ID), n.volume("b", img.ID)
	b.ID += "-volume-2"
	n.mount(a)
	n.mount(b)
	n.keepsInUse(img.ID, 2, a)
	n.removeRootfs(a)
	n.keepsInUse(img.ID, 1, b)
	n.restart()
	if err := n.Remove(testContext(t), img.ID); !errors.Is(err, fault.Unavailable) {
		t.Errorf("removed while its users are not known: %v", err)
	}
	if err := n.Adopt(t.Context(), []Rootfs{b}); err != nil {
		t.Fatal(err)
	}
	n.keepsInUse(img.ID, 1, b)
	if n.read(b, "etc/motd") != "in use" {
		t.Error("b lost its image")
	}
	n.removeRootfs(b)
	n.remove(img.RepoTags[0])
	n.empty()
}

// An image of which an earlier version has said that it goes with its last container is listed, and
// can be removed after that.
func TestImageThatAnEarlierVersionMarkedAsRemoved(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	r := n.rootfs("a", img.ID)
	n.mount(r)
	ok(t, n.store.SetMetadata(holdID(img.ID), "removed"))
	ok(t, n.store.RemoveNames(img.ID, img.RepoTags))
	n.open() // as after kill -9: nothing was closed
	ok(t, n.Adopt(testContext(t), []Rootfs{r}))
	n.keepsInUse(img.ID, 1, r)
	n.removeRootfs(r)
	n.remove(img.RepoDigests[0])
	n.empty()
}

// The hold outlives its last user by a grace, which Remove and Close end.
func TestImageReferenceGracePeriod(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	held := func() bool {
		_, err := n.store.Container(holdPrefix + img.ID)
		return err == nil
	}
	r := n.rootfs("a", img.ID)
	n.mount(r)
	if !held() {
		t.Fatal("no hold while in use")
	}
	if _, err := n.store.DeleteImage(img.ID, true); !errors.Is(err, cstorage.ErrImageUsedByContainer) {
		t.Errorf("another tool may delete the image: %v", err)
	}
	if err := n.holds.expire(t.Context(), img.ID); err != nil || !held() { // a timer that was late
		t.Errorf("the hold went while in use: %v", err)
	}
	n.removeRootfs(r)
	if !held() {
		t.Error("the hold went at once")
	}
	n.restart()
	if held() {
		t.Error("the hold outlived the store")
	}
	n.holds.grace = 20 * time.Millisecond
	n.mount(r)
	n.removeRootfs(r)
	wait.For(t, "the hold to end with its grace", func() bool { return !held() })
	n.holds.grace = time.Hour
	n.mount(r)
	n.removeRootfs(r)
	n.remove(img.ID)
	n.empty()
}

// After a crash the holds are whatever the records of the pods say.
func TestAdopt(t *testing.T) {
	t.Parallel()
	n, one := pulled(t, motd(t, "one"))
	two := n.pull(serve(t, "two", "1", motd(t, "two")).Addr() + "/two:1")
	a, b := n.rootfs("a", one.ID), n.rootfs("b", two.ID)
	n.mount(a)
	n.mount(b)
	n.open() // as after kill -9: nothing was closed
	if err := n.Adopt(t.Context(), []Rootfs{b}); err != nil {
		t.Fatal(err)
	}
	if holds, err := n.holds.records(); err != nil || len(holds) != 1 || !holds[two.ID] {
		t.Errorf("holds %v, %v", holds, err)
	}
	if n.read(b, "etc/motd") != "two" {
		t.Error("b was disturbed")
	}
	if err := n.UnmountRootfs(a); err != nil {
		t.Fatal(err)
	}
	n.remove(one.ID)
	if len(n.list()) != 1 {
		t.Error("an image nobody uses was not removed")
	}

	// A power cut may lose the record; an image may be gone altogether.
	if err := n.store.DeleteContainer(holdPrefix + two.ID); err != nil {
		t.Fatal(err)
	}
	gone := n.rootfs("c", strings.Repeat("0", 64))
	n.open()
	if err := n.Adopt(t.Context(), []Rootfs{gone, b}); !errors.Is(err, fault.NotFound) {
		t.Errorf("a missing image: %v", err)
	}
	if holds, err := n.holds.records(); err != nil || len(holds) != 1 {
		t.Errorf("holds %v, %v", holds, err)
	}
	n.removeRootfs(gone)
	n.removeRootfs(b)
	n.remove(two.ID)
	if err := n.RemoveRootfs(testContext(t), a); err != nil {
		t.Fatal(err)
	}
	n.empty()
}

// beginPull starts the job of a pull.
func beginPull(ctx context.Context, d *durable.Leftovers, image, parent string, needs durable.Needs) (*durable.Job, error) {
	j, err := d.PreparePull(ctx, parent)
	if err != nil {
		return nil, err
	}
	return j, j.Begin(ctx, image, needs)
}

// A crash between the deletion of an image's record and that of its layers,
// and one in the middle of a pull, are made good at the next start.
func TestRecoverAfterCrash(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	parent, err := n.store.CreateLayer("", "", nil, "", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	top, err := n.store.CreateLayer("", parent.ID, nil, "", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	orphan, err := n.store.CreateLayer("", "", nil, "", false, nil) // another tool's, before our work
	if err != nil {
		t.Fatal(err)
	}
	removal, err := n.leftovers.BeginRemoval(t.Context(), []string{top.ID, parent.ID})
	if err != nil {
		t.Fatal(err)
	}
	pull, err := beginPull(t.Context(), n.leftovers, "", t.TempDir(), durable.Needs{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.store.CreateLayer("", "", nil, "", false, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(pull.Temporary, "blob"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	removal.Lock.Close() // as the kernel does when the process dies
	pull.Lock.Close()
	n.restart()
	if _, err := os.Stat(pull.Temporary); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("temporary files: %v", err)
	}
	if err := n.store.DeleteLayer(orphan.ID); err != nil {
		t.Errorf("another tool's layer: %v", err)
	}
	n.empty()
}

// Of an image that the library had only begun to record nothing stays: nobody would list
// it, nor remove it. One that a dead pull had no more to do with than to find it there does.
func TestIncompleteImageOfADeadProcessIsDeleted(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	whole := n.pull(serve(t, "app", "1", motd(t, "x")).Addr() + "/app:1")
	dead := []string{whole.ID, "", "no-such-image"}
	for digit, names := range map[string][]string{"a": nil, "b": {"example.com/app:1"}} {
		layer, err := n.store.CreateLayer("", "", nil, "", false, nil)
		if err != nil {
			t.Fatal(err)
		}
		id := strings.Repeat(digit, 64)
		config := []cstorage.ImageBigDataOption{{Key: "sha256:" + id, Data: []byte("{}")}}
		if _, err := n.store.CreateImage(id, names, layer.ID, "", &cstorage.ImageOptions{BigData: config}); err != nil {
			t.Fatal(err)
		}
		dead = append(dead, id)
	}
	for _, image := range dead {
		job, err := beginPull(t.Context(), n.leftovers, image, "", durable.Needs{})
		if err != nil {
			t.Fatal(err)
		}
		job.Lock.Close() // as the kernel does when the process dies
	}
	n.restart()
	n.remove(whole.ID)
	n.empty()
}

// A pull that only asks a registry keeps nothing from being swept: it has written nothing, and may wait for long.
func TestAskingPullKeepsNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	asking, err := n.leftovers.PreparePull(t.Context(), "")
	ok(t, err)
	failed, err := beginPull(t.Context(), n.leftovers, "", "", durable.Needs{})
	ok(t, err)
	orphan := filepath.Join("root", driverName+"-images", strings.Repeat("a", 64))
	ok(t, os.MkdirAll(filepath.Join(n.dir, orphan), 0o700))
	failed.End(testContext(t), false)
	if _, err := os.Stat(filepath.Join(n.dir, orphan)); err == nil {
		t.Error("the files of an image without a record are left")
	}
	ok(t, asking.Begin(t.Context(), strings.Repeat("b", 64), durable.Needs{}))
	asking.End(testContext(t), true)
	n.noDebris()
}

// A crash leaves layers to other programs that were made before the pull knew its image, as a failure does.
func TestDeadPullOwnsNothingMadeBeforeItBegan(t *testing.T) {
	t.Parallel()
	for _, begins := range []bool{false, true} {
		t.Run(fmt.Sprintf("begins %t", begins), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			dead, err := n.leftovers.PreparePull(t.Context(), "")
			ok(t, err)
			others, err := n.store.CreateLayer("", "", nil, "", false, nil)
			ok(t, err)
			if begins {
				wait.For(t, "the clock of files to pass that layer", func() bool {
					n.write("clock", "")
					st, err := os.Stat(filepath.Join(n.dir, "clock"))
					return err == nil && st.ModTime().After(others.Created)
				})
				ok(t, dead.Begin(t.Context(), "", durable.Needs{}))
				_, err = n.store.CreateLayer("", "", nil, "", false, nil)
				ok(t, err)
			}
			dead.Lock.Close() // as the kernel does when the process dies
			n.restart()
			if left := n.layerIDs(); !slices.Equal(left, []string{others.ID}) {
				t.Errorf("layers %q, want %s of another program alone", left, others.ID)
			}
			ok(t, n.store.DeleteLayer(others.ID))
			n.empty()
		})
	}
}

// A pull asks a registry while layers of others are swept, which can take long.
func TestPullIsPreparedDuringASweep(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	failed, err := beginPull(t.Context(), n.leftovers, "", "", durable.Needs{})
	ok(t, err)
	prepared := make(chan *durable.Job, 1)
	tracer := &trace.Tracer{Hook: func(at trace.Point) error {
		if at.Step == "sweep staging directories" && !at.After {
			go func() {
				asking, _ := n.leftovers.PreparePull(testContext(t), "")
				prepared <- asking
			}()
			wait.For(t, "the other pull", func() bool { return len(prepared) > 0 })
		}
		return nil
	}}
	ok(t, tracer.Do(testContext(t), "pull image", "", func(ctx context.Context) error {
		failed.End(ctx, false)
		return nil
	}))
	(<-prepared).End(testContext(t), true)
	n.noDebris()
}

// A start does not disturb a pull in another process, and leaves the leftovers of a dead one until
// that pull is over.
func TestRecoverLeavesLivePulls(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	other := durable.NewLeftovers(n.store, n.locks) // of another process
	dead, err := beginPull(t.Context(), other, "", "", durable.Needs{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.store.CreateLayer("", "", nil, "", false, nil); err != nil {
		t.Fatal(err)
	}
	dead.Lock.Close()
	live, err := beginPull(t.Context(), n.leftovers, "", "", durable.Needs{})
	if err != nil {
		t.Fatal(err)
	}
	if err := durable.NewLeftovers(n.store, n.locks).Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if layers, _ := n.store.Layers(); len(layers) != 1 || len(n.entries("root/crius-pulls")) != 2 {
		t.Error("a layer or a job went while a pull is under way")
	}
	live.End(testContext(t), true)
	n.restart()
	n.empty()
}

// What a start could not delete the next one deletes, also in the same process.
func TestNextStartTriesAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	dead, err := beginPull(t.Context(), n.leftovers, "", "", durable.Needs{})
	if err != nil {
		t.Fatal(err)
	}
	dead.Lock.Close() // as the kernel does when the process dies
	busy := filepath.Join(dead.Temporary, "busy")
	if err := os.Mkdir(busy, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", busy, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	n.restart()
	if jobs := n.entries("root/crius-pulls"); len(jobs) != 1 {
		t.Errorf("jobs %q, want that which cannot be deleted", jobs)
	}
	if err := unix.Unmount(busy, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	n.restart()
	n.empty()
}

// The library deletes an image's record before its manifest and config. If a process dies in
// between, the next start deletes these, but not those of other images.
func TestOrphanedImageDataIsDeleted(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	const images = "root/overlay-images/"
	gone := digestOf("an image that was")
	if err := os.MkdirAll(filepath.Join(n.dir, images, gone), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.dir, images, gone, "manifest"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	removal, err := n.leftovers.BeginRemoval(testContext(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	removal.Lock.Close() // as the kernel does when the process dies
	n.restart()
	if _, err := os.Stat(filepath.Join(n.dir, images, gone)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its directory: %v", err)
	}
	if _, err := n.Image(testContext(t), img.ID); err != nil {
		t.Errorf("another image: %v", err)
	}
	if len(n.entries(images+img.ID)) == 0 {
		t.Error("another image has lost its manifest")
	}
}

// A record file that the library was writing is deleted at the next start.
func TestHalfWrittenRecordsGo(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	var half []string
	for _, kind := range []string{"images", "layers", "containers"} {
		file := filepath.Join(n.dir, "root", "overlay-"+kind, ".tmp-"+kind+".json123")
		if err := os.WriteFile(file, []byte("["), 0o600); err != nil {
			t.Fatal(err)
		}
		half = append(half, file)
	}
	n.restart()
	for _, file := range half {
		if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", file, err)
		}
	}
	if _, err := n.Image(testContext(t), img.ID); err != nil {
		t.Error(err)
	}
}

// Notes of an archive (tar-split) whose layer was not added, since the worker was killed just before
// it, are deleted at the next start, and those of layers stay.
func TestTarSplitDataWithoutLayerGo(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	gone := digestOf("a layer that never was")
	ok(t, os.WriteFile(n.tarSplit(gone), []byte("x"), 0o600))
	n.restart()
	if _, err := os.Stat(n.tarSplit(gone)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	for _, id := range n.chain(img) {
		if _, err := os.Stat(n.tarSplit(id)); err != nil {
			t.Error(err)
		}
	}
}

// Temporary files that cannot be deleted, since the disk fails for one, are not
// forgotten: the next pull or start deletes them.
func TestTemporaryFilesThatStayAreNotForgotten(t *testing.T) {
	t.Parallel()
	for _, again := range []string{"pull", "start"} {
		t.Run(again, func(t *testing.T) {
			n := newNode(t)
			job, err := beginPull(testContext(t), n.leftovers, "", t.TempDir(), durable.Needs{})
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(job.Temporary, "blob")
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount(file, file, "", unix.MS_BIND, ""); err != nil { // what is mounted on cannot be deleted
				t.Fatal(err)
			}
			job.End(testContext(t), true)
			if err := unix.Unmount(file, unix.MNT_DETACH); err != nil {
				t.Fatal(err)
			}
			if again == "pull" {
				next, err := beginPull(testContext(t), n.leftovers, "", "", durable.Needs{})
				if err != nil {
					t.Fatal(err)
				}
				next.End(testContext(t), true)
			} else {
				n.restart()
			}
			if _, err := os.Stat(job.Temporary); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("temporary files: %v", err)
			}
			n.empty()
		})
	}
}

// A store has one owner: another crius can neither release its holds nor make its own, and learns
// the owner. (The lock belongs to the process, so another process must take it.)
func TestSecondOwnerIsRefused(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	r := n.rootfs("a", img.ID)
	n.mount(r)
	other := n.cfg
	other.StateDir = filepath.Join(n.dir, "other")
	said := n.childFails("own", other)
	for _, want := range []string{"in use by", n.cfg.StateDir, fmt.Sprint("process ", os.Getpid()), "image.root"} {
		if !strings.Contains(said, want) {
			t.Errorf("said %q, without %q", said, want)
		}
	}
	if held, err := n.holds.records(); err != nil || len(held) != 1 {
		t.Errorf("holds %v, %v", held, err)
	}
	n.removeRootfs(r)
}

// A store stays that of the crius whose containers use it, also while no server
// runs; once there are none anybody may have it.
func TestStoreOfStoppedOwnerIsRefused(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	r := n.rootfs("a", img.ID)
	n.mount(r)
	mine := n.cfg
	other := mine
	other.StateDir = filepath.Join(n.dir, "other")
	looking := other
	looking.ReadOnly = true
	ok(t, n.Close(t.Context()))
	for _, cfg := range []Options{other, looking} {
		s, err := openStore(testContext(t), cfg)
		if taken := new(owner.TakenError); !errors.As(err, &taken) || taken.Running || !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), mine.StateDir) {
			t.Errorf("%v, %v", s, err)
		}
	}
	n.open()
	if held, err := n.holds.records(); err != nil || len(held) != 1 {
		t.Errorf("holds %v, %v", held, err)
	}
	n.removeRootfs(r)
	ok(t, os.RemoveAll(r.Dir))
	ok(t, n.Close(t.Context()))
	n.cfg = other
	n.open()
}

// A read-only store changes no hold, even when it undoes something.
func TestReadOnlyStoreDeletesNoImageReference(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	r := n.rootfs("a", img.ID)
	n.mount(r)
	ok(t, n.Close(t.Context()))
	mine := n.cfg
	n.cfg.ReadOnly = true
	n.open()
	for name, err := range map[string]error{
		"mount": n.MountRootfs(testContext(t), n.rootfs("b", img.ID)), "remove": n.Remove(testContext(t), img.ID),
		"drop": n.holds.drop(testContext(t), img.ID, "a"), "adopt": n.Adopt(testContext(t), nil),
	} {
		if !errors.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if held, err := n.holds.records(); err != nil || len(held) != 1 {
		t.Errorf("holds %v, %v", held, err)
	}
	ok(t, n.Close(t.Context()))
	n.cfg = mine
	n.open()
	n.removeRootfs(r)
}

// Root file systems are made while a large image comes in, and do not wait for it.
func TestMountDoesNotWaitForPull(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	large := noise(t, 600<<10, 600<<10)
	r := serve(t, "large", "1", large)
	halfway, finish := make(chan struct{}), make(chan struct{})
	r.Inject(registry.Fault{Path: "/blobs/" + layerDigest(large, 0), Do: func(answer http.Handler, stop <-chan struct{}) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			answer.ServeHTTP(&pausing{ResponseWriter: w, after: 300 << 10, pause: func() {
				close(halfway)
				select {
				case <-finish:
				case <-stop:
				}
			}}, req)
		})
	}})
	var pull sync.WaitGroup
	pull.Go(func() { n.pull(r.Addr() + "/large:1") })
	<-halfway
	start := time.Now()
	for i := range 10 {
		c := n.rootfs(fmt.Sprint(i), img.ID)
		n.mount(c)
		n.removeRootfs(c)
		n.holds.expire(t.Context(), img.ID) // so that each needs the library's locks
		n.list()
	}
	took := time.Since(start)
	if len(n.list()) != 1 {
		t.Error("the pull was over before it was needed")
	}
	close(finish)
	pull.Wait()
	t.Logf("10 root file systems during a pull: %s", took)
}

// pausing is an answer that pauses once, when so many bytes are on their way.
type pausing struct {
	http.ResponseWriter
	after int
	pause func()
}

func (p *pausing) Write(content []byte) (n int, err error) {
	if p.after > 0 && len(content) >= p.after {
		if n, err = p.ResponseWriter.Write(content[:p.after]); err != nil {
			return n, err
		}
		_ = http.NewResponseController(p.ResponseWriter).Flush()
		content, p.after = content[n:], 0
		p.pause()
	}
	p.after -= len(content)
	rest, err := p.ResponseWriter.Write(content)
	return n + rest, err
}

func TestMountOptions(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.Options = append(c.Options, "overlay.mountopt=nodev,noexec,metacopy=on") })
	img := n.pull(serve(t, "app", "1", build(t, image.Image{
		Config: imagespec.ImageConfig{},
		Layers: []image.Layer{layer(t, image.Device("null", 1, 3))},
	})).Addr() + "/app:1")
	r := n.rootfs("c", img.ID)
	n.mount(r)
	defer n.removeRootfs(r)
	if _, err := os.OpenFile(filepath.Join(r.Target, "null"), os.O_RDWR, 0); !errors.Is(err, unix.EACCES) {
		t.Errorf("nodev: %v", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(r.Target, &st); err != nil || st.Flags&unix.ST_NOEXEC == 0 {
		t.Errorf("noexec: flags %x, %v", st.Flags, err)
	}
}

// What an earlier version of crius, or another tool, has unpacked with trusted.* attributes of
// the image shows nothing else than its own files, in containers and as volume.
func TestLayersOfOthersShowNoOtherDirectory(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(c *Options) { c.Options = append(c.Options, "overlay.mountopt=nodev,metacopy=on") })
	base := layer(t, image.Dir("secret"), image.Text("secret/key", "s3cr3t"))
	img := n.pull(serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{base, layer(t, image.Dir("d"), image.Text("f", ""))}})).Addr() + "/app:1")
	top := n.diff(n.chain(img)[0])
	ok(t, unix.Lsetxattr(filepath.Join(top, "d"), "trusted.overlay.redirect", []byte("/secret"), 0))
	ok(t, unix.Lsetxattr(filepath.Join(top, "f"), "trusted.overlay.redirect", []byte("/secret/key"), 0))
	ok(t, unix.Lsetxattr(filepath.Join(top, "f"), "trusted.overlay.metacopy", nil, 0))
	n.restart()
	mapped := n.rootfs("mapped", img.ID)
	mapped.UserNS = userNS(t, 100000)
	for _, r := range []Rootfs{n.rootfs("c", img.ID), n.volume("v", img.ID), mapped} {
		n.mount(r)
		for _, file := range []string{"d/key", "f"} {
			if got, err := os.ReadFile(filepath.Join(r.Target, file)); err == nil {
				t.Errorf("read-only %v, user namespace %q: %s shows %q", r.ReadOnly, r.UserNS, file, got)
			}
		}
		if n.read(r, "secret/key") != "s3cr3t" {
			t.Error("a file of the layer below is missing")
		}
		n.removeRootfs(r)
	}
}

func TestUnsupportedOptionsAreRefused(t *testing.T) {
	t.Parallel()
	for _, option := range []string{
		"overlay.mount_program=/bin/true", "overlay.force_mask=700", "overlay.use_composefs=true", "mount_program=/bin/true",
	} {
		dir := t.TempDir()
		cfg := Config{Root: dir + "/root", RunRoot: dir + "/run", Options: []string{option}}
		if _, err := openStore(t.Context(), Options{Config: cfg}); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), option) {
			t.Errorf("%s: %v", option, err)
		}
	}
	if _, err := openStore(t.Context(), Options{Config: Config{Root: t.TempDir() + "/a:b", RunRoot: t.TempDir()}}); !errors.Is(err, fault.Invalid) {
		t.Errorf("colon in the root: %v", err)
	}
}

func TestLayersAreSyncedByDefault(t *testing.T) {
	t.Parallel()
	for _, options := range [][]string{nil, {"overlay.mountopt=nodev"}} {
		got, err := Config{Root: "/a", RunRoot: "/b", Options: options}.library()
		if err != nil || got.GraphDriverOptions[len(got.GraphDriverOptions)-1] != "overlay.sync=filesystem" {
			t.Errorf("%q: %q, %v", options, got.GraphDriverOptions, err)
		}
	}
	got, err := Config{Root: "/a", RunRoot: "/b", Options: []string{"overlay.sync=none"}}.library()
	if err != nil || strings.Join(got.GraphDriverOptions, " ") != "overlay.sync=none" {
		t.Errorf("%q, %v", got.GraphDriverOptions, err)
	}
}
