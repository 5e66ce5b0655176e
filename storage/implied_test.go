package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
)

// A directory that a layer has only in the names of its entries is the same one as in the layers
// below: it has the attributes of that. Without one below it has the mode 0755 and belongs to root.
func TestImpliedDirectories_containerd_3017_containers_storage_1288(t *testing.T) {
	t.Parallel()
	dir := func(name string, mode int64, id int) image.File {
		f := image.Dir(name).Owned(id, id+1)
		f.Mode = mode
		f.ModTime = time.Unix(1_100_000_000+int64(id), 0)
		return f
	}
	p := dir("p", 0o2770, 7)
	p.PAXRecords = map[string]string{"SCHILY.xattr.user.of": "below"}
	file := image.Text("p/new", "x")
	const asBelow, plain, above = "2770 7:8 below 1100000007", "755 0:0  now", "700 9:10  1100000009"
	n := newNode(t)
	r := serve(t, "app", "none", build(t, image.Image{}))
	images := 0
	for name, test := range map[string]struct {
		layers [][]image.File
		want   map[string]string // by path
	}{
		"below":                               {[][]image.File{{p, dir("tmp", 0o1777, 0)}, {file, image.Text("tmp/x", "")}}, map[string]string{"p": asBelow, "tmp": "1777 0:1  1100000000", ".": plain}},
		"in three layers":                     {[][]image.File{{p}, {file}, {image.Text("other", "")}, {image.Text("p/more", "")}}, map[string]string{"p": asBelow}},
		"with an entry after it":              {[][]image.File{{p}, {file, dir("p", 0o700, 9)}}, map[string]string{"p": above}},
		"with an entry before it":             {[][]image.File{{p}, {dir("p", 0o700, 9), file}}, map[string]string{"p": above}},
		"with an entry above it":              {[][]image.File{{p, dir("p/q", 0o711, 5)}, {dir("p", 0o700, 9), image.Text("p/q/new", "")}}, map[string]string{"p": above, "p/q": "711 5:6  1100000005"}},
		"nearest":                             {[][]image.File{{p}, {dir("p", 0o700, 9)}, {file}}, map[string]string{"p": above}},
		"nothing below":                       {[][]image.File{{dir("a", 0o711, 5)}, {image.Text("a/b/c", "")}}, map[string]string{"a": "711 5:6  1100000005", "a/b": plain}},
		"nothing at all":                      {[][]image.File{{image.Text("a/b", "")}}, map[string]string{"a": plain, ".": plain}},
		"link below":                          {[][]image.File{{dir("t", 0o700, 9), image.Symlink("p", "t")}, {file}}, map[string]string{"p": plain, "t": above}},
		"link out of it below":                {[][]image.File{{image.Symlink("p", "../../../../../../../../../tmp")}, {file}}, map[string]string{"p": plain}},
		"link in the path below":              {[][]image.File{{dir("t", 0o700, 9), dir("t/q", 0o711, 5), image.Symlink("p", "t")}, {image.Text("p/q/new", "")}}, map[string]string{"p/q": plain, "t/q": "711 5:6  1100000005"}},
		"link beside it":                      {[][]image.File{{dir("t", 0o700, 9)}, {image.Symlink("way", "t"), image.Text("way/x", "")}}, map[string]string{"t": above}},
		"file below":                          {[][]image.File{{image.Text("p", "").Owned(7, 8)}, {file}}, map[string]string{"p": plain}},
		"file between":                        {[][]image.File{{p}, {image.Text("p", "").Owned(7, 8)}, {file}}, map[string]string{"p": plain}},
		"removed below":                       {[][]image.File{{p}, {image.Whiteout("p")}, {file}}, map[string]string{"p": plain}},
		"removed above it":                    {[][]image.File{{dir("a", 0o711, 5), dir("a/b", 0o700, 9)}, {image.Whiteout("a")}, {image.Text("a/b/c", "")}}, map[string]string{"a": plain, "a/b": plain}},
		"made again below":                    {[][]image.File{{p}, {image.Whiteout("p")}, {dir("p", 0o700, 9)}, {file}}, map[string]string{"p": above}},
		"whiteout in it":                      {[][]image.File{{p, image.Text("p/old", "")}, {image.Whiteout("p/old")}}, map[string]string{"p": asBelow}},
		"opaque":                              {[][]image.File{{p, dir("p/q", 0o700, 9)}, {image.Opaque("p"), image.Text("p/q/new", "")}}, map[string]string{"p": asBelow, "p/q": plain}},
		"opaque below":                        {[][]image.File{{p, dir("p/q", 0o700, 9)}, {dir("p", 0o711, 5), image.Opaque("p")}, {image.Text("p/q/new", "")}}, map[string]string{"p": "711 5:6  1100000005", "p/q": plain}},
		"opaque, and made again":              {[][]image.File{{p}, {dir("p", 0o711, 5), image.Opaque("p"), dir("p/q", 0o700, 9)}, {image.Text("p/q/new", "")}}, map[string]string{"p/q": above}},
		"replaced, implied again":             {[][]image.File{{p, dir("p/q", 0o711, 5)}, {dir("p/q", 0o700, 9), image.Text("p/q", ""), image.Whiteout("p/r")}, {image.Text("p/q2", "")}}, map[string]string{"p": asBelow}},
		"root":                                {[][]image.File{{dir(".", 0o1711, 5)}, {file}, {file}}, map[string]string{".": "1711 5:6  now", "p": plain}},
		"root, whose layer is not the lowest": {[][]image.File{{file}, {dir(".", 0o700, 9)}, {file}}, map[string]string{".": "700 9:10  now", "p": plain}},
	} {
		var layers []image.Layer
		for _, files := range test.layers {
			layers = append(layers, layer(t, files...))
		}
		images++
		r.Push("app", fmt.Sprint(images), build(t, image.Image{Layers: layers}))
		n.checkDirectories(name, n.pull(fmt.Sprintf("%s/app:%d", r.Addr(), images)), test.want)
	}
}

// The same layer has other attributes above another base, though its content comes from the store.
func TestImpliedDirectoriesOfSharedLayer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	base := func(mode int64) image.Layer {
		p := image.Dir("p").Owned(int(mode), 8)
		p.Mode = mode
		return layer(t, p)
	}
	shared := layer(t, image.Text("p/new", "x"))
	r := serve(t, "app", "a", build(t, image.Image{Layers: []image.Layer{base(0o711), shared}}))
	r.Push("app", "b", build(t, image.Image{Layers: []image.Layer{base(0o1777), shared}}))
	for tag, mode := range map[string]int{"a": 0o711, "b": 0o1777} {
		img := n.pull(r.Addr() + "/app:" + tag)
		n.checkDirectories(tag, img, map[string]string{"p": fmt.Sprintf("%o %d:8  1704067200", mode, mode)})
	}
}

// checkDirectories compares what a container sees of directories.
func (n *node) checkDirectories(name string, img *Image, want map[string]string) {
	n.t.Helper()
	c := n.rootfs("c"+img.ID, img.ID)
	n.mount(c)
	defer n.removeRootfs(c)
	for path, want := range want {
		var st unix.Stat_t
		value := make([]byte, 100)
		full := filepath.Join(c.Target, path)
		ok(n.t, unix.Lstat(full, &st))
		size, err := unix.Lgetxattr(full, "user.of", value)
		if err != nil && !errors.Is(err, unix.ENODATA) {
			n.t.Error(&os.PathError{Op: "getxattr", Path: path, Err: err})
		}
		at := fmt.Sprint(st.Mtim.Sec)
		if time.Unix(st.Mtim.Sec, 0).After(time.Unix(1_750_000_000, 0)) {
			at = "now"
		}
		got := fmt.Sprintf("%o %d:%d %s %s", st.Mode&0o7777, st.Uid, st.Gid, strings.TrimRight(string(value[:max(size, 0)]), "\x00"), at)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR || got != want {
			n.t.Errorf("%s: %s is %s (type %o), want %s", name, path, got, st.Mode&unix.S_IFMT, want)
		}
	}
}
