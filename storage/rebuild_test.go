package storage

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
)

// block is an entry of an archive that archive/tar does not write.
func block(t testing.TB, name string, kind byte, content string) []byte {
	t.Helper()
	h := make([]byte, 512)
	copy(h, name)
	copy(h[100:], "0000644\x000000000\x000000000\x00")
	copy(h[124:], fmt.Sprintf("%011o\x0000000000000\x00        %c", len(content), kind))
	copy(h[257:], "ustar\x0000")
	sum := 0
	for _, b := range h {
		sum += int(b)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	h = append(h, content...)
	return append(h, make([]byte, (512-len(content)%512)%512)...)
}

// sparse is a layer with a sparse file as bsdtar writes it: GNU's format 1.0 in PAX.
func sparse(t testing.TB) image.Layer {
	t.Helper()
	records := ""
	for _, r := range []string{"GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name=holes", "GNU.sparse.realsize=1048576"} {
		records += fmt.Sprintf("%d %s\n", len(r)+4, r)
	}
	blocks := "2\n0\n512\n1048064\n512\n"
	content := blocks + strings.Repeat("\x00", 512-len(blocks)) + strings.Repeat("a", 512) + strings.Repeat("z", 512)
	archive := slices.Concat(block(t, "PaxHeader/holes", tar.TypeXHeader, records), block(t, "GNUSparseFile.0/holes", tar.TypeReg, content), make([]byte, 1024))
	return image.RawLayer(archive)
}

// A layer that the store has above another base is taken from there only if that gives the
// content that the layer was made from: whatever its files are, or have become. Otherwise it
// comes from the registry, as if the store did not have it.
func TestLayersThatCannotBeRebuiltAreDownloaded(t *testing.T) {
	t.Parallel()
	plain := []image.File{image.Dir("d"), image.Text("d/f", "text of the file")}
	damage := func(do func(diff string) error) func(*node, string) {
		return func(n *node, id string) { ok(n.t, do(n.diff(id))) }
	}
	for name, test := range map[string]struct {
		layer   image.Layer
		damage  func(n *node, id string)
		rebuilt bool
		file    string // of the layer, with content
		content string
	}{
		"plain":                            {layer: layer(t, plain...), rebuilt: true, file: "d/f", content: "text of the file"},
		"sparse file of bsdtar":            {layer: sparse(t), file: "holes", content: strings.Repeat("a", 512) + strings.Repeat("\x00", 1047552) + strings.Repeat("z", 512)},
		"file behind a link":               {layer: layer(t, image.Dir("d"), image.Symlink("l", "d"), image.Text("l/f", "x")), rebuilt: true, file: "d/f", content: "x"},
		"file behind an absolute link":     {layer: layer(t, image.Dir("d"), image.Symlink("l", "/d"), image.Text("l/f", "x")), rebuilt: true, file: "d/f", content: "x"},
		"device of the node behind a link": {layer: layer(t, image.Dir("dev"), image.Symlink("l", "/dev"), image.Text("l/zero", "x")), rebuilt: true, file: "dev/zero", content: "x"},
		"file that became a fifo": {layer: layer(t, image.Dir("d"), image.Text("d/f", "x"), image.Symlink("l", "d"), image.Text("g", "y"),
			image.File{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "l/f", Mode: 0o600}}), file: "g", content: "y"},
		"dots in names":           {layer: layer(t, image.Dir("d"), image.Text("d/../e", "x"), image.Text("./d/./f", "y")), rebuilt: true, file: "e", content: "x"},
		"whiteout with content":   {layer: layer(t, image.Text("f", "x"), image.Text(".wh.gone", "content")), file: "f", content: "x"},
		"AUFS":                    {layer: layer(t, image.Text(".wh..wh.aufs", "a"), image.Dir(".wh..wh.plnk"), image.Text(".wh..wh.plnk/7.8", "b"), image.Text("f", "x")), file: "f", content: "x"},
		"changed file":            {layer: layer(t, plain...), damage: damage(func(d string) error { return os.WriteFile(d+"/d/f", []byte("TEXT of the file"), 0o644) }), file: "d/f", content: "text of the file"},
		"file that has grown":     {layer: layer(t, plain...), damage: damage(func(d string) error { return os.Truncate(d+"/d/f", 1<<40) }), file: "d/f", content: "text of the file"},
		"file that is gone":       {layer: layer(t, plain...), damage: damage(func(d string) error { return os.Remove(d + "/d/f") }), file: "d/f", content: "text of the file"},
		"fifo instead of a file":  {layer: layer(t, plain...), damage: damage(func(d string) error { return errors.Join(os.Remove(d+"/d/f"), unix.Mkfifo(d+"/d/f", 0o600)) }), file: "d/f", content: "text of the file"},
		"directory gone":          {layer: layer(t, plain...), damage: damage(func(d string) error { return os.Rename(d, d+".away") }), file: "d/f", content: "text of the file"},
		"no description":          {layer: layer(t, plain...), damage: func(n *node, id string) { remove(n.t, n.tarSplit(id)) }, file: "d/f", content: "text of the file"},
		"empty description":       {layer: layer(t, plain...), damage: func(n *node, id string) { truncate(n.t, n.tarSplit(id)) }, file: "d/f", content: "text of the file"},
		"cut description":         {layer: layer(t, plain...), damage: func(n *node, id string) { ok(n.t, os.Truncate(n.tarSplit(id), 40)) }, file: "d/f", content: "text of the file"},
		"description of no entry": {layer: layer(t, plain...), damage: func(n *node, id string) { ok(n.t, os.WriteFile(n.tarSplit(id), packed(n.t, ""), 0o600)) }, file: "d/f", content: "text of the file"},
		"description of nonsense": {layer: layer(t, plain...), damage: func(n *node, id string) {
			ok(n.t, os.WriteFile(n.tarSplit(id), packed(n.t, `{"type": 1, "name": "../../../../../../../../etc/passwd", "size": 1}`), 0o600))
		}, file: "d/f", content: "text of the file"},
	} {
		for how, program := range map[string]bool{"crius-unpack": true, "containers/image": false} {
			t.Run(name+" "+how, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				if !program {
					n.puller.Program = nil
				}
				r := serve(t, "app", "a", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("base", "1")), test.layer}}))
				r.Push("app", "b", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("base", "2")), test.layer}}))
				r.Push("app", "twice", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("base", "3")), test.layer, layer(t, image.Text("other", "4")), test.layer}}))
				first := n.pull(r.Addr() + "/app:a")
				if test.damage != nil {
					test.damage(n, n.chain(first)[0])
				}
				r.Forget()
				second := n.pull(r.Addr() + "/app:b")
				if asked := wanted(r, test.layer.Digest); asked == test.rebuilt {
					t.Errorf("the registry was asked for the layer: %t", asked)
				}
				third := n.pull(r.Addr() + "/app:twice")
				for _, img := range []*Image{second, third} {
					for _, id := range n.chain(img) {
						record, err := n.store.Layer(id)
						ok(t, err)
						if record.UncompressedDigest != test.layer.DiffID {
							continue
						}
						content, err := os.ReadFile(filepath.Join(n.diff(id), test.file))
						if string(content) != test.content {
							t.Errorf("%s: layer %s: %.20q, %v", img.RepoTags, id, content, err)
						}
					}
				}
				if test.damage != nil {
					return
				}
				for _, img := range n.list() {
					n.remove(img.ID)
				}
				n.empty()
			})
		}
	}
}

// sharedLog is written to from several goroutines.
type sharedLog struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *sharedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *sharedLog) lines(word string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, word) {
			found = append(found, line)
		}
	}
	return found
}

// The log says once which layer could not be rebuilt, and why.
func TestLayerThatCannotBeRebuiltIsLogged(t *testing.T) {
	for _, program := range []bool{true, false} {
		var log sharedLog
		old := slog.Default()
		slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
		defer slog.SetDefault(old)
		n := newNode(t)
		if !program {
			n.puller.Program = nil
		}
		common := layer(t, image.Text("f", "x"))
		r := serve(t, "app", "a", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("base", "1")), common}}))
		r.Push("app", "b", build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("base", "2")), common}}))
		top := n.chain(n.pull(r.Addr() + "/app:a"))[0]
		ok(t, os.WriteFile(filepath.Join(n.diff(top), "f"), []byte("y"), 0o644))
		n.pull(r.Addr() + "/app:b")
		slog.SetDefault(old)
		lines := log.lines("cannot rebuild")
		if len(lines) != 1 || !strings.Contains(lines[0], "level=WARN") || !strings.Contains(lines[0], "layer "+top) ||
			!strings.Contains(lines[0], "checksum failed") || !strings.Contains(lines[0], "/app:b") {
			t.Errorf("with crius-unpack %t: %q", program, lines)
		}
	}
}

// wanted reports whether a registry was asked for a blob.
func wanted(r *registry.Registry, blob digest.Digest) bool {
	return slices.ContainsFunc(r.Requests(), func(q registry.Request) bool { return strings.HasSuffix(q.Path, "/blobs/"+blob.String()) })
}

func packed(t testing.TB, text string) []byte {
	t.Helper()
	var to bytes.Buffer
	w := gzip.NewWriter(&to)
	_, err := io.WriteString(w, text)
	ok(t, errors.Join(err, w.Close()))
	return to.Bytes()
}

// The check after a power cut opens nothing that a layer leads to elsewhere on the node, and
// waits for no fifo; it reads files behind links where they are.
func TestPowerCutCheckStaysInTheLayer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	odd := build(t, image.Image{Layers: []image.Layer{
		layer(t, image.Dir("dev"), image.Symlink("l", "/dev"), image.Text("l/zero", "x")),
		layer(t, image.Dir("d"), image.Text("d/g", "z"), image.Symlink("m", "/d"), image.Text("m/f", "y")),
	}})
	ref := serve(t, "app", "1", odd).Addr() + "/app:1"
	img := n.pull(ref)
	n.cutPower(true, func() {})
	if images := n.list(); len(images) != 1 || images[0].ID != img.ID {
		t.Errorf("after a power cut: %v", images)
	}
	for what, damage := range map[string]func(file string) error{
		"changed": func(file string) error { return os.WriteFile(file, []byte("n"), 0o644) },
		"a fifo":  func(file string) error { return errors.Join(os.Remove(file), unix.Mkfifo(file, 0o600)) },
	} {
		img := n.pull(ref)
		top := n.diff(n.chain(img)[0])
		n.cutPower(true, func() { ok(t, damage(filepath.Join(top, "d/g"))) })
		if images := n.list(); len(images) > 0 {
			t.Errorf("a file that is %s was not found: %v", what, images)
		}
	}
}
