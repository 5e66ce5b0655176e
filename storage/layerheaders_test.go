package storage

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
)

// tarHeader is a header with content, which archive/tar would not write.
func tarHeader(name string, kind byte, content string) []byte {
	const size = 512
	all := make([]byte, size)
	copy(all, name)
	copy(all[100:], "0000755\x000000000\x000000000\x00")
	copy(all[124:], fmt.Sprintf("%011o\x0000000000000\x00        ", len(content)))
	all[156] = kind
	copy(all[257:], "ustar\x0000")
	sum := 0
	for _, b := range all {
		sum += int(b)
	}
	copy(all[148:], fmt.Sprintf("%06o\x00 ", sum))
	all = append(all, content...)
	return append(all, make([]byte, -len(content)&(size-1))...)
}

func rawLayer(entries ...[]byte) image.Layer {
	return image.RawLayer(append(slices.Concat(entries...), make([]byte, 1024)...))
}

// paxRecord is a record of a PAX header.
func paxRecord(key, value string) string {
	length := len(key) + len(value) + 3
	for digits := 1; ; digits++ {
		if text := fmt.Sprint(length + digits); len(text) == digits {
			return text + " " + key + "=" + value + "\n"
		}
	}
}

// behindZeros returns records behind one with a length of 21 digits. A parser that reads only 20 of them
// takes that record for a shorter one, and the records for the content of a second one.
func behindZeros(records string) string {
	const whole = 310
	first := "000000000000000000310 k=abcdef\n"
	second := fmt.Sprintf("%d j=", whole+len(records)-len(first))
	return first + second + strings.Repeat("z", whole-1-len(first)-len(second)) + "\n" + records
}

// No form of a PAX header gets an attribute past the filter.
func TestTrustedAttributesBehindLeadingZerosAreDropped(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{rawLayer(
		tarHeader("p", tar.TypeXHeader, behindZeros(paxRecord("SCHILY.xattr.trusted.overlay.redirect", "/secret")+paxRecord("path", "d"))),
		tarHeader("other", tar.TypeDir, ""),
	)}}))
	for _, xattr := range attributesOf(t, filepath.Join(n.diff(n.chain(img)[0]), "d")) {
		if strings.HasPrefix(xattr, "trusted.") {
			t.Errorf("d has %s", xattr)
		}
	}
}

// What headers make counts, however they say it.
func TestHeadersThatMakeTooMuchAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	deep := strings.Repeat("d/", 300) + "f"
	sparse := paxRecord("GNU.sparse.major", "0") + paxRecord("GNU.sparse.minor", "1") + paxRecord("GNU.sparse.numblocks", "0") + paxRecord("GNU.sparse.size", fmt.Sprint(400<<20))
	file := tarHeader("f", tar.TypeReg, "")
	r := serve(t, "app", "", motd(t, "x"))
	for what, bad := range map[string]image.Layer{
		"directories":  rawLayer(tarHeader("g", tar.TypeXGlobalHeader, paxRecord("path", deep)), file),
		"more than 25": rawLayer(tarHeader("p", tar.TypeXHeader, behindZeros(paxRecord("path", deep))), file),
		"sparse":       rawLayer(tarHeader("p", tar.TypeXHeader, sparse), file),
	} {
		r.Push("app", "bad", build(t, image.Image{Layers: []image.Layer{bad}}))
		_, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"})
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	n.empty()
}

// A hard link has the attributes of the file that it is to, which may be of a kind that has none.
func TestUserAttributesOnHardLinks(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{layer(t,
		image.Symlink("link", "file"), with(image.Hardlink("l", "link"), "user.a", "b"),
		image.File{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "pipe", Mode: 0o600}}, with(image.Hardlink("p", "pipe"), "user.a", "b"),
		with(image.Text("file", "x"), "user.a", "b"), with(image.Hardlink("f", "file"), "user.a", "b"),
	)}}))
	top := n.diff(n.chain(img)[0])
	for name, want := range map[string]bool{"l": false, "p": false, "f": true} {
		if slices.Contains(attributesOf(t, filepath.Join(top, name)), "user.a") != want {
			t.Errorf("%s: want its attribute %t", name, want)
		}
	}
}

// Some old archives give directories a size; there is no content.
func TestOldDirectoryWithSize(t *testing.T) {
	t.Parallel()
	directory := tarHeader("dir/", 0, strings.Repeat("x", 4096))[:512]
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{rawLayer(directory, tarHeader("dir/f", tar.TypeReg, "x"))}}))
	if _, err := os.Stat(filepath.Join(n.diff(n.chain(img)[0]), "dir/f")); err != nil {
		t.Error(err)
	}
}

// Links lead where names do not say: directories behind them count, and so do the steps to follow
// them.
func TestLinksThatLeadTooFarAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	deep := strings.Repeat("a/", 250)
	down := []image.File{image.Dir(deep), image.Symlink("s0", deep)}
	for i := range 3 {
		down = append(down, image.Dir(fmt.Sprint("s", i, "/", deep)), image.Symlink(fmt.Sprint("s", i+1), fmt.Sprint("s", i, "/", deep)))
	}
	var loops []image.File
	there := strings.Repeat("a/", 120)
	loops = append(loops, image.Dir(there), image.Symlink("l", there+strings.Repeat("../", 120)))
	for i := range 200 {
		loops = append(loops, image.Text(fmt.Sprint(strings.Repeat("l/", 200), i, "/f"), ""))
	}
	var dangling []image.File
	for i := range 5 {
		dangling = append(dangling, image.Symlink(fmt.Sprint("l", i), fmt.Sprint("d", i, "/", deep)), image.Text(fmt.Sprint("l", i, "/f"), ""))
	}
	r := serve(t, "app", "", motd(t, "x"))
	for what, files := range map[string][]image.File{"behind links": down, "too many links": loops, "does not have": dangling} {
		r.Push("app", "bad", build(t, image.Image{Layers: []image.Layer{layer(t, files...)}}))
		if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:bad"}); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	n.empty()
}

// A link may replace a directory of its layer: what the directory had is gone, and no attribute of it reaches
// what the link leads to. Entries that make something else of the root are left out.
func TestLastEntryReplacesDirectoryOfTheLayer(t *testing.T) {
	t.Parallel()
	root := image.Symlink(".", "d")
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{layer(t,
		image.Dir("d"), image.Dir("d/e"), image.Dir("l/e"), image.Text("l/e/gone", "x"), image.Symlink("l", "d"), image.Text("l/f", "x"),
		image.Dir("file/full"), image.Text("file/full/gone", "x"), image.Text("file", "content"), root,
	)}}))
	top := n.diff(n.chain(img)[0])
	for _, name := range []string{"d/e", "d/f"} {
		if _, err := os.Lstat(filepath.Join(top, name)); err != nil {
			t.Error(err)
		}
	}
	if to, err := os.Readlink(filepath.Join(top, "l")); err != nil || to != "d" {
		t.Errorf("link to %q, %v", to, err)
	}
	if content, err := os.ReadFile(filepath.Join(top, "file")); err != nil || string(content) != "content" {
		t.Errorf("%q, %v", content, err)
	}
	if _, err := os.Lstat(filepath.Join(top, "d/e/gone")); err == nil {
		t.Error("it has a file of the directory that was replaced")
	}
}

// An attribute for which the file system has no place is not a full disk, which somebody could free.
func TestAttributeThatDoesNotFit(t *testing.T) {
	t.Parallel()
	d := newDisk(t, 64) // ext4
	n := newNode(t, func(c *Options) { c.Root = filepath.Join(d.path, "root") })
	a := build(t, image.Image{Layers: []image.Layer{layer(t, with(image.Text("file", "x"), "user.large", strings.Repeat("x", 20_000)))}})
	_, err := n.Pull(testContext(t), PullRequest{Image: serve(t, "app", "1", a).Addr() + "/app:1"})
	if !errors.Is(err, fault.Invalid) || errors.Is(err, fault.Exhausted) || !strings.Contains(err.Error(), "user.large") || strings.Contains(err.Error(), "free space") {
		t.Errorf("%v", err)
	}
	n.empty()
}

// Directories that are links in the same layer, as /lib of merged distributions, are followed.
func TestEntriesBehindLinks(t *testing.T) {
	t.Parallel()
	n, img := pulled(t, build(t, image.Image{Layers: []image.Layer{layer(t,
		image.Symlink("lib", "usr/lib"), image.Text("lib/a", "x"), image.Symlink("abs", "/usr/lib/deep/er"), image.Text("abs/b", "x"), image.Text("usr/lib/c", "x"),
	)}}))
	for _, name := range []string{"a", "c", "deep/er/b"} {
		if _, err := os.Lstat(filepath.Join(n.diff(n.chain(img)[0]), "usr/lib", name)); err != nil {
			t.Error(err)
		}
	}
}
