package storage

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/reserve"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestRootfsUsage(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	c := n.rootfs("c", img.ID)
	n.mount(c)
	empty, err := n.RootfsUsage(c)
	if err != nil || empty.InodesUsed != 1 || empty.Mountpoint != n.containersDir || empty.Timestamp.IsZero() {
		t.Errorf("empty: %+v, %v", empty, err)
	}
	write := func(name string, size int) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(c.Target, name), bytes.Repeat([]byte("x"), size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("large", 1<<20)
	for _, link := range []string{"link1", "link2"} {
		if err := os.Link(filepath.Join(c.Target, "large"), filepath.Join(c.Target, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(c.Target, "etc/motd")); err != nil { // leaves a whiteout, in a copied directory
		t.Fatal(err)
	}
	full, err := n.RootfsUsage(c)
	if grown := full.UsedBytes - empty.UsedBytes; err != nil || grown < 1<<20 || grown > 1<<20+64<<10 || full.InodesUsed != 4 {
		t.Errorf("full: %+v, %v", full, err)
	}
	_, containers, err := n.FsInfo(testContext(t))
	n.background.Wait() // which measures images, too
	images, _, _ := n.FsInfo(testContext(t))
	if err != nil || containers.UsedBytes != full.UsedBytes || containers.InodesUsed != 4 || containers.Mountpoint != n.containersDir {
		t.Errorf("file system of the containers: %+v, %v", containers, err)
	}
	if known, writable, err := n.Sizes(); err != nil || known != images.UsedBytes || known == 0 || writable != full.UsedBytes {
		t.Errorf("sizes: %d, %d, %v; want %d, %d", known, writable, err, images.UsedBytes, full.UsedBytes)
	}
	n.background.Wait() // or what measures would still see it
	n.removeRootfs(c)
	if _, containers, _ := n.FsInfo(testContext(t)); containers.UsedBytes != 0 {
		t.Errorf("after the removal: %+v", containers)
	}
	if gone, err := n.RootfsUsage(c); err != nil || gone.UsedBytes != 0 || gone.InodesUsed != 0 {
		t.Errorf("gone: %+v, %v", gone, err)
	}
}

// Who asks for a container's usage waits for no measurement, and gets the next
// one's result later.
func TestWritableUsage(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, motd(t, "x"))
	c := n.rootfs("c", img.ID)
	if usage, ok := n.WritableUsage(t.Context(), c.ID); ok {
		t.Errorf("before there is one: %+v", usage)
	}
	n.background.Wait() // that has measured all there was: nothing
	n.usage.mu.Lock()
	n.usage.next = time.Now().Add(time.Hour) // however slow the machine is
	n.usage.mu.Unlock()
	n.mount(c)
	fresh, ok := n.WritableUsage(t.Context(), c.ID)
	if !ok || fresh.InodesUsed != 1 || fresh.Mountpoint != n.containersDir || fresh.Timestamp.IsZero() {
		t.Errorf("new: %+v, %v", fresh, ok)
	}
	if err := os.WriteFile(filepath.Join(c.Target, "large"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	n.background.Wait()
	if usage, _ := n.WritableUsage(t.Context(), c.ID); usage != fresh {
		t.Errorf("measured again within %s: %+v", usageAge, usage)
	}
	n.usage.mu.Lock()
	n.usage.next = time.Now()
	n.usage.mu.Unlock()
	n.WritableUsage(t.Context(), "nobody")
	n.background.Wait()
	full, ok := n.WritableUsage(t.Context(), c.ID)
	if !ok || full.UsedBytes < 1<<20 || full.InodesUsed != 2 || !full.Timestamp.After(fresh.Timestamp) {
		t.Errorf("full: %+v, %v", full, ok)
	}
	n.removeRootfs(c)
	if usage, ok := n.WritableUsage(t.Context(), c.ID); ok {
		t.Errorf("removed: %+v", usage)
	}
}

func TestUsageCache(t *testing.T) {
	t.Parallel()
	var c usageCache
	if !c.begin() || c.begin() {
		t.Error("measuring does not begin once")
	}
	// Measured long ago: the layer was removed while it was.
	c.note("gone", FsUsage{InodesUsed: 1, Timestamp: time.Now().Add(-time.Hour)})
	c.note("here", FsUsage{InodesUsed: 2, Timestamp: time.Now()})
	c.end(time.Now().Add(-3 * time.Second)) // it took three seconds
	if sum := c.sum(); sum.InodesUsed != 2 {
		t.Errorf("the sum is %+v", sum)
	}
	c.keep("here", FsUsage{UsedBytes: 7, InodesUsed: 1})
	c.keep("unknown", FsUsage{InodesUsed: 5})
	if sum := c.sum(); sum.UsedBytes != 7 || sum.InodesUsed != 7 {
		t.Errorf("the sum after a failure is %+v", sum)
	}
	if rest := time.Until(c.next); rest < 55*time.Second || rest > 65*time.Second || c.begin() {
		t.Errorf("after three seconds' work comes a rest of %s", rest)
	}
	c.end(time.Now().Add(-time.Hour))
	if rest := time.Until(c.next); rest > usageRestMax || rest < usageRestMax-5*time.Second {
		t.Errorf("after an hour's work comes a rest of %s", rest)
	}
	c.next = time.Now()
	if !c.begin() {
		t.Error("after the rest nothing begins")
	}
	c.end(time.Now())
	if rest := time.Until(c.next); rest > usageAge || rest < usageAge-5*time.Second {
		t.Errorf("after no work comes a rest of %s", rest)
	}
}

// Directories nested deeper than any path can name them hide nothing.
func TestRootfsUsageSeesDeepDirectories(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c := n.rootfs("deep", "")
	upper := filepath.Join(c.Dir, upperName)
	if err := os.MkdirAll(upper, 0o700); err != nil {
		t.Fatal(err)
	}
	dir, err := unix.Open(upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.Repeat("d", 200)
	for range 50 {
		if err := unix.Mkdirat(dir, name, 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(dir)
		dir = next
	}
	unix.Close(dir)
	if usage, err := n.RootfsUsage(c); err != nil || usage.InodesUsed != 51 {
		t.Errorf("%+v, %v", usage, err)
	}
	n.removeRootfs(c)
	if left := entriesOf(t, c.Dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestFsInfoOfImages(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	before, _, err := n.FsInfo(testContext(t))
	if err != nil || before.UsedBytes > 64<<10 || before.Mountpoint != n.cfg.Root || before.InodesUsed == 0 {
		t.Errorf("empty: %+v, %v", before, err)
	}
	img := n.pull(serve(t, "app", "1", noise(t, 1<<20, 1<<20)).Addr() + "/app:1")
	var after FsUsage
	wait.For(t, "the space of 2 MiB", func() bool {
		after, _, err = n.FsInfo(testContext(t))
		return err == nil && after.UsedBytes >= 2<<20 && after.UsedBytes <= 2<<20+128<<10 && after.InodesUsed >= before.InodesUsed+4
	})
	n.remove(img.ID)
	wait.For(t, "the space of the image", func() bool { // what was seen while it was pulled may be remembered for a while
		after, _, err = n.FsInfo(testContext(t))
		return err == nil && after.UsedBytes <= before.UsedBytes+64<<10
	})
}

// Recorded usage is available while another tool has the store locked.
func TestFsInfoWaitsForNobody(t *testing.T) {
	t.Parallel()
	n, _ := pulled(t, noise(t, 1<<20))
	want, _, err := n.FsInfo(testContext(t))
	ok(t, err)
	n.child("lock")
	got, _, err := n.FsInfo(testContext(t)) // the lock is held all the while
	if err != nil || got.UsedBytes != want.UsedBytes {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
}

// disk is a small ext4 file system of its own.
type disk struct {
	t    *testing.T
	path string
}

func newDisk(t *testing.T, megabytes int, options ...string) *disk {
	t.Helper()
	dir := t.TempDir()
	img, path := filepath.Join(dir, "disk.img"), filepath.Join(dir, "mnt")
	for _, args := range [][]string{
		{"truncate", "-s", fmt.Sprintf("%dM", megabytes), img},
		append([]string{"mkfs.ext4", "-q", "-F", "-m", "0", img}, options...),
		{"mkdir", path},
		{"mount", "-o", "loop", img, path},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
	}
	d := &disk{t, path}
	t.Cleanup(func() {
		// Lazily, as containers/storage leaks a lock file when the disk is full.
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount the disk: %v", err)
		}
	})
	return d
}

// freeze makes every write hang until thaw.
func (d *disk) freeze() { d.ioctl(0xC0045877) }
func (d *disk) thaw()   { d.ioctl(0xC0045878) }

func (d *disk) ioctl(request uint) {
	d.t.Helper()
	f, err := os.Open(d.path)
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	if err := unix.IoctlSetInt(int(f.Fd()), request, 0); err != nil {
		d.t.Fatal(err)
	}
}

func (d *disk) fill() {
	d.t.Helper()
	f, err := os.Create(filepath.Join(d.path, "ballast"))
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	for size := 1 << 20; size > 0; size /= 2 {
		for err == nil {
			_, err = f.Write(make([]byte, size))
		}
		err = nil
	}
}

// empty removes what fill has made, and waits for the room: a process that another test has forked may have the
// file open until it executes its program, and the file system gives blocks back when it has written its journal.
// overlayfs, which asks for room once, would mount read-only before.
func (d *disk) empty() {
	d.t.Helper()
	path := filepath.Join(d.path, "ballast")
	f, err := os.Open(d.path)
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(os.Truncate(path, 0), os.Remove(path), unix.Syncfs(int(f.Fd()))); err != nil {
		d.t.Fatal(err)
	}
	wait.For(d.t, "room on the disk", func() bool {
		probe := filepath.Join(d.path, "probe")
		err := errors.Join(os.WriteFile(probe, make([]byte, 256<<10), 0o600), unix.Syncfs(int(f.Fd())))
		return errors.Join(err, os.Remove(probe), unix.Syncfs(int(f.Fd()))) == nil
	})
}

// A pull onto a full disk says so and leaves nothing; when there is room again
// everything works.
func TestPullOntoFullDisk(t *testing.T) {
	t.Parallel()
	d := newDisk(t, 32)
	n := newNode(t, func(c *Options) { c.Root = filepath.Join(d.path, "root") })
	r := serve(t, "app", "1", noise(t, 4<<20, 40<<20))
	r.Push("app", "2", noise(t, 4<<20))
	for range 2 {
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		if !errors.Is(err, fault.Exhausted) {
			t.Errorf("%v", err)
		}
		n.empty()
	}
	img := n.pull(r.Addr() + "/app:2")
	c := n.rootfs("c", img.ID)
	d.fill()
	err := n.MountRootfs(testContext(t), c)
	if !errors.Is(err, fault.Exhausted) {
		t.Errorf("mount: %v", err)
	}
	d.empty()
	n.mount(c)
	n.removeRootfs(c)
	n.remove(img.ID)
	n.empty()
}

// After a reboot the library probes the kernel again, which needs some space: on a full disk the
// reserve provides it, so that images can be removed.
func TestOpenAfterRebootOnFullDisk(t *testing.T) {
	t.Parallel()
	d := newDisk(t, 32)
	n := newNode(t, func(c *Options) { c.Root = filepath.Join(d.path, "root") })
	r := serve(t, "app", "1", noise(t, 4<<20))
	img := n.pull(r.Addr() + "/app:1")
	if err := n.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	n.bootAgain(false)
	d.fill()
	n.reboot()
	n.open()
	n.remove(img.ID)
	n.empty()
}

// reboot empties the run root: it is another one, since the library keeps a store that it has
// opened in this process.
func (n *node) reboot() { n.cfg.RunRoot += "+" }

// A start that failed on a disk with little room does not make the kernel one without overlay
// file systems.
func TestOpenAfterFailureOnFullDisk(t *testing.T) {
	t.Parallel()
	d := newDisk(t, 32)
	n := newNode(t, func(c *Options) { c.Root = filepath.Join(d.path, "root") })
	failed := 0
	for blocks := range int64(12) {
		if err := n.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(n.cfg.Root, reserve.Name)); err != nil {
			t.Fatal(err)
		}
		d.fill()
		d.free(blocks * 1024)
		n.reboot()
		s, err := openStore(testContext(t), n.cfg)
		if err != nil {
			failed++
			if !fault.DiskFull(err) {
				t.Errorf("with %d blocks free: %v", blocks, err)
			}
		} else if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
		d.empty()
		n.open()
	}
	if failed < 2 {
		t.Errorf("%d starts failed: the disk was not full", failed)
	}
}

// free frees bytes bytes of those that fill has taken.
func (d *disk) free(bytes int64) {
	d.t.Helper()
	path := filepath.Join(d.path, "ballast")
	info, err := os.Stat(path)
	if err == nil {
		err = os.Truncate(path, info.Size()-bytes)
	}
	if err != nil {
		d.t.Fatal(err)
	}
}

// A pull that was killed on a full disk leaves a layer that the library deletes before it reads
// any other, which takes room: images are listed and removed all the same, after a start and
// without one.
func TestIncompleteLayerOnFullDisk(t *testing.T) {
	t.Parallel()
	for what, restarts := range map[string]bool{"start": true, "no start": false} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			d := newDisk(t, 32)
			n := newNode(t, func(c *Options) { c.Root = filepath.Join(d.path, "root") })
			r := serve(t, "app", "1", noise(t, 4<<20))
			img := n.pull(r.Addr() + "/app:1")
			if restarts {
				ok(t, n.Close(context.Background()))
				n.bootAgain(false)
				n.reboot()
			} else {
				n.images.forget(img.ID) // as if another program had pulled it
			}
			n.addIncompleteLayer(d)
			if restarts {
				driverSetUp.Lock()
				var err error
				n.Store, err = Open(testContext(t), n.cfg)
				driverSetUp.Unlock()
				ok(t, err)
			}
			if images := n.list(); len(images) != 1 {
				t.Errorf("%d images are listed", len(images))
			}
			n.remove(img.ID)
			if !restarts {
				n.othersWrite() // once it has failed, the library leaves the layer to the next process
			}
			n.empty()
		})
	}
}

// Without the reserve no image is taken for an unusable one because the disk is full.
func TestFullDiskHidesNoImage(t *testing.T) {
	t.Parallel()
	d := newDisk(t, 32)
	n := newNode(t, func(c *Options) { c.Root = filepath.Join(d.path, "root") })
	r := serve(t, "app", "1", noise(t, 4<<20))
	img := n.pull(r.Addr() + "/app:1")
	ok(t, os.Remove(filepath.Join(n.cfg.Root, reserve.Name)))
	n.images.forget(img.ID)
	n.addIncompleteLayer(d)
	if images, err := n.images.list(testContext(t)); !fault.DiskFull(err) {
		t.Errorf("%d images are listed, %v", len(images), err)
	}
	d.empty()
	n.othersWrite()
	n.remove(img.ID)
	n.empty()
}

// addIncompleteLayer adds the remains of a layer whose unpacking was killed when it had filled the
// disk.
func (n *node) addIncompleteLayer(d *disk) {
	n.t.Helper()
	half := digestOf("half")
	ok(n.t, os.MkdirAll(n.diff(half), 0o755))
	n.editLayers(func(layers []map[string]any) []map[string]any { return append(layers, incompleteLayer(half)) })
	n.othersWrite()
	d.fill()
}

// incompleteLayer is the record of a layer that was being unpacked.
func incompleteLayer(id string) map[string]any {
	return map[string]any{"id": id, "created": time.Now(), "flags": map[string]any{"incomplete": true}}
}

// editLayers changes the records of layers on the disk.
func (n *node) editLayers(edit func([]map[string]any) []map[string]any) {
	n.t.Helper()
	path := filepath.Join(n.cfg.Root, layersFile)
	text, err := os.ReadFile(path)
	ok(n.t, err)
	var layers []map[string]any
	ok(n.t, json.Unmarshal(text, &layers))
	text, err = json.Marshal(edit(layers))
	ok(n.t, err)
	ok(n.t, os.WriteFile(path, text, 0o600))
}

// othersWrite has the library read the layers again, as if another program had written them.
func (n *node) othersWrite() {
	n.t.Helper()
	ok(n.t, os.WriteFile(filepath.Join(n.cfg.Root, "overlay-layers/layers.lock"), random(64), 0o600))
}
