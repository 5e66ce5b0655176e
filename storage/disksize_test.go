package storage

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/registry/download"
	"github.com/crius-run/crius/test/kit/image"
)

// diskUse returns what du(1) says of files and directories in total, those that exist.
func diskUse(t testing.TB, paths ...string) uint64 {
	t.Helper()
	args := []string{"-sc", "-B1"}
	for _, path := range paths {
		if _, err := os.Lstat(path); err == nil {
			args = append(args, path)
		}
	}
	out, err := exec.Command("du", args...).Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	total, err := strconv.ParseUint(strings.Fields(lines[len(lines)-1])[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return total
}

// sized are images whose size on the disk is not the one of their archives.
func sized(t *testing.T) map[string]image.Image {
	t.Helper()
	var many, links, attributes []image.File
	for i := range 1500 {
		many = append(many, image.Text(fmt.Sprintf("d%d/%d", i%40, i), strings.Repeat("x", i%300)))
	}
	links = append(links, image.Regular("one", 0o644, random(1<<20)))
	for i := range 50 {
		links = append(links, image.Hardlink(fmt.Sprint("link", i), "one"))
	}
	for i := range 400 {
		f := image.Text(fmt.Sprint("f", i), "x")
		f.PAXRecords = map[string]string{"SCHILY.xattr.user.a": strings.Repeat(strconv.Itoa(i%10), 600)}
		attributes = append(attributes, f)
	}
	var layers []image.Layer
	for i := range 60 {
		layers = append(layers, layer(t, image.Text(fmt.Sprint("f", i), "x")))
	}
	return map[string]image.Image{
		"one large file":   {Layers: []image.Layer{layer(t, image.Regular("noise", 0o644, random(3<<20)))}},
		"many small files": {Layers: []image.Layer{layer(t, many...)}},
		"hard links":       {Layers: []image.Layer{layer(t, links...)}},
		"attributes":       {Layers: []image.Layer{layer(t, attributes...)}},
		"many layers":      {Layers: layers},
		"sparse file":      {Layers: []image.Layer{image.RawLayer(withHoles(t))}},
		"replaced files":   {Layers: []image.Layer{layer(t, image.Regular("f", 0o644, random(1<<20))), layer(t, image.Regular("f", 0o644, random(2<<20)))}},
	}
}

// withHoles returns an archive with a sparse file.
func withHoles(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	ok(t, os.WriteFile(filepath.Join(dir, "sparse"), random(1<<20), 0o600))
	ok(t, os.Truncate(filepath.Join(dir, "sparse"), 4<<20))
	archive, err := exec.Command("tar", "-C", dir, "--format=gnu", "-S", "-c", ".").Output()
	ok(t, err)
	return archive
}

// What is reported of images agrees with du within 1 %, on each file system: the total, the size of an
// image, and what its removal frees. So it does for layers of which crius has noted nothing.
func TestSizesAgreeWithDu(t *testing.T) {
	t.Parallel()
	for name, onto := range map[string]func(*testing.T, *Options){
		"tmpfs": func(t *testing.T, o *Options) {
			o.Root = filepath.Join(t.TempDir(), "root")
			ok(t, os.Mkdir(o.Root, 0o700))
			ok(t, unix.Mount("tmpfs", o.Root, "tmpfs", 0, "size=200m"))
			t.Cleanup(func() {
				if err := unix.Unmount(o.Root, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			})
		},
		"ext4":       func(t *testing.T, o *Options) { o.Root = filepath.Join(newDisk(t, 200, "-b", "4096").path, "root") },
		"small ext4": func(t *testing.T, o *Options) { o.Root = filepath.Join(newDisk(t, 200, "-b", "1024").path, "root") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testSizes(t, newNode(t, func(o *Options) { onto(t, o) }))
		})
	}
}

func testSizes(t *testing.T, n *node) {
	all, parts := []*Image{}, map[string]int{}
	// The first image brings files and directories that are there from then on, and the last to be removed takes them.
	lists := n.pull(serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("f", "x"))}})).Addr() + "/app:1")
	for name, i := range sized(t) {
		before := n.imagesOnDisk()
		img := n.pull(serve(t, "app", "1", build(t, i)).Addr() + "/app:1")
		all, parts[img.ID] = append(all, img), len(i.Layers)
		near(t, "size of an image with "+name, img.Size, n.imagesOnDisk()-before, len(i.Layers))
	}
	small := image.Files{}
	for i := range 300 {
		small[fmt.Sprint("f", i)] = fmt.Sprint(i)
	}
	before := n.imagesOnDisk()
	weights := n.pull(serve(t, "m", "1", files(t, small)).Addr() + "/m:1")
	near(t, "size of an artifact of small files", weights.Size, n.imagesOnDisk()-before, len(small))
	all, parts[weights.ID] = append(all, weights), len(small)
	n.sizeIsThatOfTheDisk("images")

	shared := layer(t, image.Regular("base", 0o644, random(2<<20)))
	r := serve(t, "app", "1", build(t, image.Image{Layers: []image.Layer{shared, layer(t, image.Text("a", "1"))}}))
	r.Push("app", "2", build(t, image.Image{Layers: []image.Layer{shared, layer(t, image.Text("a", "2"))}}))
	first := n.pull(r.Addr() + "/app:1")
	all = append(all, n.pull(r.Addr()+"/app:2"))
	n.sizeIsThatOfTheDisk("a layer that two images have")
	n.remove(first.ID)
	n.sizeIsThatOfTheDisk("one of two images removed")

	half := noise(t, 6<<20)
	n.failPull(serve(t, "app", "1", half), "app:1", layerDigest(half, 0))
	if kept, _ := kept(t, n.cfg.Root); kept < mega/2 {
		t.Errorf("%d bytes of the download are kept", kept)
	}
	n.sizeIsThatOfTheDisk("a download that is kept")

	n.restart()
	n.sizeIsThatOfTheDisk("a restart")
	layers, err := n.imageUsage.layerDirs()
	ok(t, err)
	for _, dir := range layers {
		ok(t, unix.Lremovexattr(dir, "trusted.crius.usage"))
	}
	n.restart()
	n.sizeIsThatOfTheDisk("no layer has a note")
	for _, img := range all {
		before, listed := n.imagesOnDisk(), byID(n.list(), img.ID)
		near(t, "size of an image that was measured again", listed.Size, img.Size, 0)
		n.remove(img.ID)
		near(t, "freed by a removal", img.Size, before-n.imagesOnDisk(), parts[img.ID])
	}
	n.remove(lists.ID)
	n.sizeIsThatOfTheDisk("all images removed")
	n.empty()
}

// imagesOnDisk returns what du says of the directories of images.
func (n *node) imagesOnDisk() uint64 {
	n.t.Helper()
	root, err := os.Open(n.cfg.Root)
	ok(n.t, err)
	defer root.Close()
	ok(n.t, unix.Syncfs(int(root.Fd()))) // before it file systems do not know the blocks of all files
	var dirs []string
	for _, name := range []string{"overlay", "overlay-images", "overlay-layers", download.Name} {
		dirs = append(dirs, filepath.Join(n.cfg.Root, name))
	}
	return diskUse(n.t, append(dirs, artifact.In(n.cfg.Root))...)
}

// sizeIsThatOfTheDisk compares what FsInfo says with the disk.
func (n *node) sizeIsThatOfTheDisk(when string) {
	n.t.Helper()
	n.usage.mu.Lock()
	n.usage.next = time.Time{} // however short the time since the last measurement
	n.usage.mu.Unlock()
	if _, _, err := n.FsInfo(testContext(n.t)); err != nil {
		n.t.Fatal(err)
	}
	n.background.Wait()
	reported, _, err := n.FsInfo(testContext(n.t))
	ok(n.t, err)
	near(n.t, when, reported.UsedBytes, n.imagesOnDisk(), 0)
}

// near fails the test if a size is off by more than 1 %. The disk may have some more for lists that all images
// share, which have a record or a name of each layer or file.
func near(t testing.TB, what string, size, disk uint64, parts int) {
	t.Helper()
	if off := max(size, disk) - min(size, disk); off > disk/100+8<<10+uint64(parts)<<10 {
		t.Errorf("%s: reported are %d bytes, and the disk has %d", what, size, disk)
	}
}
