package remote

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/storage/checkpoint"
	"github.com/crius-run/crius/test/kit/distribution"
	"github.com/crius-run/crius/test/kit/image"
	testregistry "github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// hostile is an artifact that a test changes.
type hostile struct {
	t        *testing.T
	manifest imagespec.Manifest
	blobs    map[digest.Digest][]byte
	registry *testregistry.Registry
}

// layer returns the layer with a title.
func (h *hostile) layer(title string) *imagespec.Descriptor {
	h.t.Helper()
	for i := range h.manifest.Layers {
		if l := &h.manifest.Layers[i]; l.Annotations[imagespec.AnnotationTitle] == title {
			return l
		}
	}
	h.t.Fatalf("no layer %q", title)
	return nil
}

// replace gives a layer another content, with a true digest.
func (h *hostile) replace(title string, content []byte) {
	h.t.Helper()
	l := h.layer(title)
	l.Digest, l.Size = digest.FromBytes(content), int64(len(content))
	h.blobs[l.Digest] = content
}

// add adds a layer.
func (h *hostile) add(title, mediaType string) {
	l := *h.layer(archiveTitle)
	l.MediaType, l.Annotations = mediaType, map[string]string{imagespec.AnnotationTitle: title}
	h.manifest.Layers = append(h.manifest.Layers, l)
}

func (h *hostile) rename(title, to string) {
	h.layer(title).Annotations = map[string]string{imagespec.AnnotationTitle: to}
}

// disturb changes the answer for a layer.
func (h *hostile) disturb(title string, how testregistry.Action) {
	h.registry.Inject(testregistry.Fault{Path: h.layer(title).Digest.String(), Do: how})
}

// packed compresses a text as a push does.
func packed(t *testing.T, write func(io.Writer) error) []byte {
	t.Helper()
	var b bytes.Buffer
	must(t, compress(&b, write))
	return b.Bytes()
}

// archived is a layer with an archive.
func archived(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	return packed(t, func(to io.Writer) error {
		out := tar.NewWriter(to)
		for _, h := range entries {
			must(t, out.WriteHeader(&h))
			_, err := io.Copy(out, strings.NewReader(strings.Repeat("x", int(h.Size))))
			must(t, err)
		}
		return out.Close()
	})
}

// zeros writes so many mebibytes.
func zeros(mib int) func(io.Writer) error {
	return func(to io.Writer) error {
		for range mib {
			if _, err := to.Write(make([]byte, 1<<20)); err != nil {
				return err
			}
		}
		return nil
	}
}

// wide is a zstd stream that wants a window of 64 MiB.
func wide(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b, zstd.WithWindowSize(64<<20), zstd.WithSingleSegment(false))
	must(t, err)
	must(t, zeros(80)(z))
	must(t, z.Close())
	return b.Bytes()
}

const (
	pages   = "c1/checkpoint/pages-1.img"
	pagesAt = pages + suffix
)

// Whatever a registry gives for a checkpoint, the pull says what is wrong, and writes nothing but files that are signed
// for, none longer than it is signed for.
func TestHostileRegistry(t *testing.T) {
	t.Parallel()
	home := distribution.Start(t, nil)
	n, stranger := newNode(t, home.Address), newNode(t)
	_, err := n.push(t.Context(), nil, home.Address+"/pods/web:1", n.checkpoint())
	must(t, err)
	raw := get(t, home.Address, "manifests", "1")
	var good imagespec.Manifest
	must(t, json.Unmarshal(raw, &good))
	blobs := map[digest.Digest][]byte{}
	for _, d := range append(good.Layers, good.Config) {
		blobs[d.Digest] = get(t, home.Address, "blobs", d.Digest.String())
	}
	signed := func(dir, name string) []byte {
		text, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		return text
	}
	foreign := stranger.checkpoint()
	for name, c := range map[string]struct {
		want   string
		change func(h *hostile)
	}{
		"nothing":              {"", func(*hostile) {}},
		"other type":           {`of the type "application/vnd.example", not a checkpoint`, func(h *hostile) { h.manifest.ArtifactType = "application/vnd.example" }},
		"no type":              {`of the type "", not a checkpoint`, func(h *hostile) { h.manifest.ArtifactType = "" }},
		"no layers":            {"has no file that could be mounted", func(h *hostile) { h.manifest.Layers = nil }},
		"no title":             {"a layer has no title", func(h *hostile) { h.layer(pagesAt).Annotations = nil }},
		"other annotation":     {"has the title", func(h *hostile) { h.layer(pagesAt).Annotations = map[string]string{"org.cncf.model.filepath": pagesAt} }},
		"title that leads out": {"not a path inside the artifact", func(h *hostile) { h.rename(pagesAt, "../../x"+suffix) }},
		"absolute title":       {"not a path inside the artifact", func(h *hostile) { h.rename(pagesAt, "/tmp/x"+suffix) }},
		"title with a detour":  {"has the title", func(h *hostile) { h.rename(pagesAt, "c1/../c1/checkpoint/pages-1.img"+suffix) }},
		"title twice":          {"another layer has it", func(h *hostile) { h.add(pagesAt, fileLayer) }},
		"title without suffix": {"does not sign for", func(h *hostile) { h.rename(pagesAt, pages) }},
		"extra layer":          {"does not sign for", func(h *hostile) { h.add("c1/evil"+suffix, fileLayer) }},
		"many layers": {"layers, more than", func(h *hostile) {
			for range 1000 {
				h.add("x", fileLayer)
			}
		}},
		"layer of another type": {"has the type", func(h *hostile) { h.layer(pagesAt).MediaType = archiveLayer }},
		"lost layer":            {"lacks 1 files", func(h *hostile) { h.manifest.Layers = append(h.manifest.Layers[:2:2], h.manifest.Layers[3:]...) }},
		"no manifest":           {"has no layer manifest.json", func(h *hostile) { h.rename(checkpoint.Manifest, "x") }},
		"foreign layer":         {"foreign layer", func(h *hostile) { h.layer(pagesAt).URLs = []string{"http://127.0.0.1:1/"} }},
		"negative size":         {"size of -1", func(h *hostile) { h.layer(pagesAt).Size = -1 }},
		"huge size":             {"bytes, more than", func(h *hostile) { h.layer(pagesAt).Size = 1 << 50 }},
		"huge manifest":         {"at most 8388608 are allowed", func(h *hostile) { h.layer(checkpoint.Manifest).Size = checkpoint.MaxManifest + 1 }},
		"broken digest":         {"digest", func(h *hostile) { h.layer(pagesAt).Digest = "sha256:../../x" }},
		"blob that is missing":  {"unknown", func(h *hostile) { h.layer(pagesAt).Digest = digest.FromString("missing") }},

		"changed manifest":  {"was not signed by this node", func(h *hostile) { h.replace(checkpoint.Manifest, []byte("{}")) }},
		"changed signature": {"not base64", func(h *hostile) { h.replace(checkpoint.Signature, []byte("!")) }},
		"checkpoint of another": {"was not signed by this node", func(h *hostile) {
			h.replace(checkpoint.Manifest, signed(foreign, checkpoint.Manifest))
			h.replace(checkpoint.Signature, signed(foreign, checkpoint.Signature))
		}},
		"other memory": {"is not the file that was signed for", func(h *hostile) { h.replace(pagesAt, packed(t, zeros(5))) }},
		"less memory":  {"is not the file that was signed for", func(h *hostile) { h.replace(pagesAt, packed(t, zeros(1))) }},
		"bomb":         {"is not the file that was signed for", func(h *hostile) { h.replace(pagesAt, packed(t, zeros(100))) }},
		"large window": {"window size exceeded", func(h *hostile) { h.replace(pagesAt, wide(t)) }},
		"no zstd":      {"magic number mismatch", func(h *hostile) { h.replace(pagesAt, []byte(noise(1000))) }},
		"bomb in the archive": {"is not the file that was signed for", func(h *hostile) {
			h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeReg, Name: "c1/spec.dump", Size: 20 << 20}))
		}},
		"no archive": {"tar", func(h *hostile) {
			h.replace(archiveTitle, packed(t, func(to io.Writer) error { _, err := io.WriteString(to, noise(2000)); return err }))
		}},
		"empty archive": {"lacks 4 files", func(h *hostile) { h.replace(archiveTitle, archived(t)) }},
		"link in the archive": {"not a regular file", func(h *hostile) {
			h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeSymlink, Name: "c1/spec.dump", Linkname: "/etc/passwd"}))
		}},
		"hard link in it": {"not a regular file", func(h *hostile) {
			h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeLink, Name: "c1/spec.dump", Linkname: "/etc/passwd"}))
		}},
		"device in it": {"not a regular file", func(h *hostile) {
			h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeBlock, Name: "c1/spec.dump"}))
		}},
		"directory in it": {"not a regular file", func(h *hostile) { h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeDir, Name: "c1/"})) }},
		"path that leads out": {"does not sign for", func(h *hostile) {
			h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeReg, Name: "../x"}))
		}},
		"file that is unknown": {"does not sign for", func(h *hostile) {
			h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeReg, Name: "c1/x"}))
		}},
		"signature in it": {"does not sign for", func(h *hostile) {
			h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeReg, Name: checkpoint.Signature}))
		}},
		"file twice": {"twice", func(h *hostile) {
			h.replace(archiveTitle, archived(t, tar.Header{Typeflag: tar.TypeReg, Name: checkpoint.Shm}, tar.Header{Typeflag: tar.TypeReg, Name: checkpoint.Shm}))
		}},
		"file of another layer": {"twice", func(h *hostile) {
			h.replace(archiveTitle, packed(t, func(to io.Writer) error {
				out := tar.NewWriter(to)
				z, err := zstd.NewReader(bytes.NewReader(blobs[h.layer(pagesAt).Digest]))
				must(t, err)
				defer z.Close()
				must(t, out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: pages, Size: 5 * largeFile}))
				_, err = io.Copy(out, z)
				must(t, err)
				return out.Close()
			}))
		}},

		"wrong content":     {"another digest", func(h *hostile) { h.disturb(pagesAt, testregistry.Replace(testregistry.Corrupt)) }},
		"truncated content": {"the registry sent", func(h *hostile) { h.disturb(pagesAt, testregistry.Replace(testregistry.Truncate)) }},
		"too much content": {"the registry sent more than", func(h *hostile) {
			h.disturb(pagesAt, testregistry.Replace(func(b []byte) []byte { return append(bytes.Clone(b), b...) }))
		}},
		"wrong manifest":       {"another digest", func(h *hostile) { h.disturb(checkpoint.Manifest, testregistry.Replace(testregistry.Corrupt)) }},
		"truncated archive":    {"the registry sent", func(h *hostile) { h.disturb(archiveTitle, testregistry.Replace(testregistry.Truncate)) }},
		"broken connection":    {"EOF", func(h *hostile) { h.disturb(pagesAt, testregistry.Reset(1000)) }},
		"page with status 200": {"the answer is a web page", func(h *hostile) { h.disturb(pagesAt, testregistry.Page(200)) }},
		"page instead of it":   {"403", func(h *hostile) { h.disturb(pagesAt, testregistry.Page(403)) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := &hostile{t: t, blobs: map[digest.Digest][]byte{}, registry: registrytest.Start(t)}
			must(t, json.Unmarshal(raw, &h.manifest))
			for d, content := range blobs {
				h.blobs[d] = content
			}
			c.change(h)
			text, err := json.Marshal(h.manifest)
			must(t, err)
			h.registry.Push("pods/web", "1", &image.Artifact{MediaType: imagespec.MediaTypeImageManifest, Manifest: text, Blobs: h.blobs})
			here := newNode(t, h.registry.Addr())
			dir, err := here.pull(nil, h.registry.Addr()+"/pods/web:1", here.keys(n.path(checkpoint.PublicFile)))
			if c.want == "" {
				must(t, err)
			} else if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			t.Log(err)
			known := map[string]int{checkpoint.Manifest: checkpoint.MaxManifest, checkpoint.Signature: checkpoint.MaxSignature}
			for _, f := range wanted(t, n, blobs[good.Layers[0].Digest], blobs[good.Layers[1].Digest]) {
				known[f.Path] = int(f.Size)
			}
			for name, text := range files(t, filepath.Dir(dir)) {
				if most, ok := known[strings.TrimPrefix(name, "pod/")]; !ok || len(text) > most {
					t.Errorf("%s was written, with %d bytes", name, len(text))
				}
			}
		})
	}
}

// wanted returns the files that a checkpoint signs for.
func wanted(t *testing.T, n *node, manifest, signature []byte) []checkpoint.File {
	t.Helper()
	s, err := checkpoint.ReadSigned(n.keys(), manifest, signature)
	must(t, err)
	return s.Manifest.Files
}

// An image is not taken for a checkpoint, even one that says it is.
func TestImageIsNoCheckpoint(t *testing.T) {
	t.Parallel()
	r := registrytest.Start(t)
	l, err := image.NewLayer(image.Text("file", "text"))
	must(t, err)
	a, err := image.Image{Layers: []image.Layer{l}}.Build()
	must(t, err)
	r.Push("pods/web", "1", a)
	var m imagespec.Manifest
	must(t, json.Unmarshal(a.Manifest, &m))
	m.MediaType, m.ArtifactType = imagespec.MediaTypeImageManifest, ArtifactType
	m.Config.MediaType, m.Layers[0].MediaType = imagespec.MediaTypeImageConfig, imagespec.MediaTypeImageLayer
	text, err := json.Marshal(m)
	must(t, err)
	r.Push("pods/web", "2", &image.Artifact{MediaType: m.MediaType, Manifest: text, Blobs: a.Blobs})
	n := newNode(t, r.Addr())
	for _, tag := range []string{"1", "2"} {
		if dir, err := n.pull(nil, r.Addr()+"/pods/web:"+tag, n.keys()); err == nil || !strings.Contains(err.Error(), "it is a container image, not a checkpoint") || len(files(t, dir)) > 0 {
			t.Errorf("%s: %v", tag, err)
		}
	}
}
