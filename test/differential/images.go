//go:build differential

package differential

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
)

// sample is an image to compare.
type sample struct {
	name   string
	layers []image.Layer
}

// samples returns all images, of which parallel makes one at a time.
func samples(dir string) (all []sample, err error) {
	for _, make := range []func(string) ([]sample, error){packed, compressions, stacked, headers, generated} {
		some, err := make(dir)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// packed returns an image for each tree as each program packs it.
func packed(dir string) (all []sample, err error) {
	for _, t := range trees {
		root, err := os.MkdirTemp(dir, "tree-")
		if err != nil {
			return nil, err
		}
		if err := first(t.make(root), age(root), unix.Chmod(root, 0o755)); err != nil {
			return nil, fmt.Errorf("%s: %w", t.name, err)
		}
		for _, p := range packers {
			archive, err := p.pack(root)
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", t.name, p.name, err)
			}
			all = append(all, sample{t.name + " by " + p.name, []image.Layer{image.RawLayer(archive)}})
		}
	}
	return all, nil
}

// compressions returns one archive in all the forms in which it is shipped.
func compressions(string) ([]sample, error) {
	layer, err := image.NewLayer(image.Dir("d"), image.Text("d/f", strings.Repeat("content ", 9999)), image.Symlink("l", "d/f"))
	if err != nil {
		return nil, err
	}
	archive, err := gunzip(layer.Blob)
	if err != nil {
		return nil, err
	}
	half := len(archive) / 2
	skippable := []byte{0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4}
	forms := map[string][]byte{
		"none":             archive,
		"gzip -9":          deflate(archive, gzip.BestCompression, gzip.Header{}),
		"gzip with fields": deflate(archive, gzip.BestSpeed, gzip.Header{Name: "layer.tar", Comment: "c", Extra: []byte("XX\x02\x00ab"), ModTime: time.Unix(5, 0)}),
		"gzip members":     append(deflate(archive[:half], 1, gzip.Header{}), deflate(archive[half:], 9, gzip.Header{})...),
		"gzip stored":      deflate(archive, gzip.NoCompression, gzip.Header{}),
		"zstd":             squeeze(archive, zstd.SpeedDefault),
		"zstd best":        squeeze(archive, zstd.SpeedBestCompression),
		"zstd frames":      append(squeeze(archive[:half], zstd.SpeedFastest), squeeze(archive[half:], zstd.SpeedDefault)...),
		"zstd skippable":   append(append([]byte{}, skippable...), squeeze(archive, zstd.SpeedDefault)...),
		"zstd trailing":    append(squeeze(archive, zstd.SpeedDefault), skippable...),
	}
	var all []sample
	for name, blob := range forms {
		all = append(all, sample{"compression " + name, []image.Layer{{Blob: blob, Digest: digest.FromBytes(blob), DiffID: digest.FromBytes(archive)}}})
	}
	for name, tail := range map[string]int{"no end": -1024, "one block": -512, "padding": 9728, "much padding": 1 << 20} {
		changed := append([]byte{}, archive[:len(archive)+min(tail, 0)]...)
		all = append(all, sample{"archive with " + name, []image.Layer{image.RawLayer(append(changed, make([]byte, max(tail, 0))...))}})
	}
	return all, nil
}

func gunzip(blob []byte) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(blob))
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	_, err = out.ReadFrom(r)
	return out.Bytes(), err
}

func deflate(data []byte, level int, header gzip.Header) []byte {
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, level) // which is valid
	w.Header = header
	_, _ = w.Write(data)
	_ = w.Close()
	return out.Bytes()
}

func squeeze(data []byte, level zstd.EncoderLevel) []byte {
	w, _ := zstd.NewWriter(nil, zstd.WithEncoderLevel(level)) // which is valid
	defer w.Close()
	return w.EncodeAll(data, nil)
}

// stacked returns images whose layers change what lower ones have.
func stacked(string) ([]sample, error) {
	base := []image.File{
		image.Dir("d"), image.Text("d/f", "lower"), image.Text("d/g", "lower"), image.Dir("d/s"), image.Text("d/s/deep", "x"),
		image.Text("f", "lower"), image.Symlink("l", "d"), image.Dir("p").Owned(7, 8),
	}
	base[7].Mode = 0o2770
	kind := func(f image.File, typeflag byte) image.File { f.Typeflag = typeflag; return f }
	uppers := map[string][]image.File{
		"whiteout of a file":              {image.Whiteout("d/f")},
		"whiteout of a directory":         {image.Whiteout("d")},
		"whiteout of nothing":             {image.Whiteout("nothing")},
		"whiteout in a missing directory": {image.Whiteout("a/b/c")},
		"whiteout, then the file":         {image.Whiteout("f"), image.Text("f", "again")},
		"the file, then whiteout":         {image.Text("f", "again"), image.Whiteout("f")},
		"opaque":                          {image.Dir("d"), image.Opaque("d"), image.Text("d/new", "n")},
		"opaque after files":              {image.Dir("d"), image.Text("d/new", "n"), image.Opaque("d")},
		"opaque without its directory":    {image.Opaque("d")},
		"opaque root":                     {image.Opaque("."), image.Text("only", "x")},
		"AUFS entries":                    {image.Text(".wh..wh.aufs", ""), image.Dir(".wh..wh.orph"), image.Dir(".wh..wh.plnk"), image.Text("x", "x")},
		"directory becomes a file":        {image.Text("d", "file")},
		"file becomes a directory":        {image.Dir("f"), image.Text("f/x", "x")},
		"link becomes a directory":        {image.Dir("l"), image.Text("l/x", "x")},
		"directory becomes a link":        {image.Symlink("d", "p")},
		"through a lower link":            {image.Text("l/x", "x")},
		"implied parent":                  {image.Text("p/new", "x")},
		"implied deep parents":            {image.Text("q/r/s/t", "x")},
		"root entry":                      {kind(image.Dir("."), tar.TypeDir), image.Text("x", "x")},
		"root entry at the end":           {image.Text("x", "x"), image.Dir(".")},
		"names with ./":                   {image.Dir("./e"), image.Text("./e/f", "x"), image.Text("e/./g", "y"), image.Text("e//h", "z")},
		"names with a leading slash":      {image.Text("/abs", "x"), image.Dir("/e"), image.Text("/e/f", "y")},
		"names with ..":                   {image.Dir("e"), image.Text("e/../up", "x"), image.Text("../../outside", "y")},
		"link, then through it":           {image.Dir("t"), image.Symlink("way", "t"), image.Text("way/x", "x")},
		"absolute link, then through it":  {image.Dir("t"), image.Symlink("way", "/t"), image.Text("way/x", "x")},
		"link to the outside":             {image.Symlink("way", "../../.."), image.Text("way/x", "x")},
		"dangling link, then through it":  {image.Symlink("way", "t/u"), image.Text("way/x", "x")},
		"link loop, then through it":      {image.Symlink("way", "way"), image.Text("way/x", "x")},
		"a file twice":                    {image.Text("x", "1"), image.Text("x", "22")},
		"a directory twice":               {image.Dir("x"), image.Text("x/f", "1"), image.Dir("x").Owned(3, 4)},
		"file, then directory":            {image.Text("x", "1"), image.Dir("x"), image.Text("x/f", "2")},
		"directory, then file":            {image.Dir("x"), image.Text("x", "1")},
		"full directory, then file":       {image.Dir("x"), image.Text("x/f", "2"), image.Text("x", "1")},
		"directory, then link":            {image.Dir("x"), image.Symlink("x", "d")},
		"link, then directory":            {image.Symlink("x", "d"), image.Dir("x"), image.Text("x/f", "2")},
		"file, then link to it":           {image.Text("x", "1"), image.Symlink("x", "x")},
		"hard link to itself":             {image.Text("x", "1"), image.Hardlink("x", "x")},
		"hard link before its target":     {image.Hardlink("y", "x"), image.Text("x", "1")},
		"hard link to a lower file":       {image.Hardlink("y", "f")},
		"hard link to a directory":        {image.Dir("x"), image.Hardlink("y", "x")},
		"hard link to a link":             {image.Text("x", "1"), image.Symlink("s", "x"), image.Hardlink("y", "s")},
		"hard link with a slash":          {image.Text("x", "1"), image.Hardlink("y", "/x")},
		"hard link to the outside":        {image.Hardlink("y", "../../etc/passwd")},
		"hard link through a link":        {image.Dir("t"), image.Text("t/x", "1"), image.Symlink("way", "t"), image.Hardlink("y", "way/x")},
		"hard link over a file":           {image.Text("x", "1"), image.Text("y", "2"), image.Hardlink("y", "x")},
		"file over a hard link":           {image.Text("x", "1"), image.Hardlink("y", "x"), image.Text("y", "2")},
		"whiteout of a hard link":         {image.Text("x", "1"), image.Hardlink("y", "x"), image.Whiteout("x")},
		"contiguous file":                 {kind(image.Text("x", "1"), tar.TypeCont)},
	}
	attributes := func(f image.File, pairs ...string) image.File {
		f.PAXRecords = map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			f.PAXRecords["SCHILY.xattr."+pairs[i]] = pairs[i+1]
		}
		return f
	}
	uppers["attributes of a link"] = []image.File{attributes(image.Symlink("x", "y"), "user.a", "1")}
	uppers["attributes of a pipe"] = []image.File{attributes(kind(image.Text("x", ""), tar.TypeFifo), "user.a", "1")}
	uppers["trusted attributes"] = []image.File{attributes(image.Dir("x"), "trusted.overlay.opaque", "y", "user.k", "v"), attributes(image.Text("z", "1"), "trusted.x", "1")}
	uppers["overlay attributes for users"] = []image.File{attributes(image.Dir("x"), "user.overlay.opaque", "y")}
	uppers["an unknown attribute"] = []image.File{attributes(image.Text("x", "1"), "nonsense.a", "1")}
	uppers["access control lists"] = []image.File{attributes(image.Text("x", "1"), "system.posix_acl_access", "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x04\x00\x04\x00\xff\xff\xff\xff\x20\x00\x04\x00\xff\xff\xff\xff")}
	uppers["a label"] = []image.File{attributes(image.Text("x", "1"), "security.selinux", "system_u:object_r:usr_t:s0")}
	var all []sample
	for name, files := range uppers {
		lower, err := image.NewLayer(base...)
		if err != nil {
			return nil, err
		}
		upper, err := image.NewLayer(files...)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, sample{"stack " + name, []image.Layer{lower, upper}}, sample{"alone " + name, []image.Layer{upper}})
	}
	return all, nil
}

// generated returns images whose layers put entries of all kinds at few paths,
// by chance.
func generated(string) (all []sample, err error) {
	for seed := range uint64(150) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := sample{name: fmt.Sprint("generated ", seed)}
		for range 1 + random.IntN(4) {
			var files []image.File
			for range 1 + random.IntN(8) {
				files = append(files, entry(random))
			}
			layer, err := image.NewLayer(files...)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.name, err)
			}
			s.layers = append(s.layers, layer)
		}
		all = append(all, s)
	}
	return all, nil
}

// entry returns an entry at one of some paths.
func entry(random *rand.Rand) image.File {
	path := func() string {
		parts := make([]string, 1+random.IntN(3))
		for i := range parts {
			parts[i] = string("abc"[random.IntN(3)])
		}
		return strings.Join(parts, "/")
	}
	name := path()
	var f image.File
	switch random.IntN(9) {
	case 0, 1:
		f = image.Dir(name)
	case 2, 3, 4:
		f = image.Text(name, fmt.Sprint(random.IntN(1000)))
	case 5:
		f = image.Symlink(name, path())
	case 6:
		f = image.Hardlink(name, path())
	case 7:
		f = image.Whiteout(name)
	case 8:
		f = image.Opaque(name)
	}
	f.Uid, f.Gid = random.IntN(3)*1000, random.IntN(3)*1000
	f.ModTime = time.Unix(1_000_000_000+random.Int64N(1000), 0)
	if f.Typeflag == tar.TypeReg || f.Typeflag == tar.TypeDir {
		f.Mode = []int64{0o755, 0o644, 0o700, 0o1777, 0o4711}[random.IntN(5)]
	}
	return f
}
