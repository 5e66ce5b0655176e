package storage

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// edited returns an index with other descriptors.
func edited(t *testing.T, of *image.Artifact, edit func(d *imagespec.Descriptor)) *image.Artifact {
	t.Helper()
	var list imagespec.Index
	ok(t, json.Unmarshal(of.Manifest, &list))
	for i := range list.Manifests {
		edit(&list.Manifests[i])
	}
	text, err := json.Marshal(list)
	ok(t, err)
	return &image.Artifact{MediaType: of.MediaType, Manifest: text, Children: of.Children}
}

// An image is found in an index of an index, and if its platform is spelled in another way.
func TestIndexesAsPeopleMakeThem(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	noPlatform := func(d *imagespec.Descriptor) { d.Platform = nil }
	spelled := func(architecture, variant string) func(d *imagespec.Descriptor) {
		return func(d *imagespec.Descriptor) {
			d.Platform = &imagespec.Platform{OS: "linux", Architecture: architecture, Variant: variant}
		}
	}
	platform := func(p imagespec.Platform) func(d *imagespec.Descriptor) {
		return func(d *imagespec.Descriptor) { d.Platform = &p }
	}
	foreign := build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("file", "riscv"))}, Platform: imagespec.Platform{OS: "linux", Architecture: "riscv64"}})
	windows := made{
		config:   altered(plainConfig, `"linux"`, `"windows"`),
		manifest: altered(plainManifest, `"size":SIZE`, `"size":SIZE,"urls":["https://elsewhere.example/layer"]`),
	}.artifact(layer(t, image.Text("file", "windows")))
	other := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	first := map[string]string{"amd64": "v1", "arm64": "v8"}[runtime.GOARCH]
	for name, of := range map[string]func(a *image.Artifact) *image.Artifact{
		"nested":          func(a *image.Artifact) *image.Artifact { return edited(t, index(t, index(t, a)), noPlatform) },
		"nested, matches": func(a *image.Artifact) *image.Artifact { return index(t, index(t, foreign), index(t, a)) },
		"nested twice":    func(a *image.Artifact) *image.Artifact { return index(t, index(t, index(t, foreign, a))) },
		"variant":         func(a *image.Artifact) *image.Artifact { return edited(t, index(t, a), spelled(runtime.GOARCH, first)) },
		"spelling":        func(a *image.Artifact) *image.Artifact { return edited(t, index(t, a), spelled(other, "")) },
		"unknown type": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, foreign, a), func(d *imagespec.Descriptor) { d.MediaType = "application/x-unknown" })
		},
		"attestation (containerd#8243)": func(a *image.Artifact) *image.Artifact {
			statement := image.RawLayer([]byte("{}"))
			return index(t, build(t, image.Image{Layers: []image.Layer{statement}, Platform: imagespec.Platform{OS: "unknown", Architecture: "unknown"}}), a)
		},
		"no platform":    func(a *image.Artifact) *image.Artifact { return edited(t, index(t, a), noPlatform) },
		"empty platform": func(a *image.Artifact) *image.Artifact { return edited(t, index(t, a), platform(imagespec.Platform{})) },
		"empty platform, docker": func(a *image.Artifact) *image.Artifact {
			docker := edited(t, index(t, a), platform(imagespec.Platform{}))
			docker.Manifest = bytes.Replace(docker.Manifest, []byte(imagespec.MediaTypeImageIndex), []byte(image.DockerIndex), 1)
			docker.MediaType = image.DockerIndex
			return docker
		},
		"only the system": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, a), platform(imagespec.Platform{OS: "linux"}))
		},
		"only the architecture": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, foreign, a), func(d *imagespec.Descriptor) { d.Platform.OS = "" })
		},
		"no platforms, the configs decide (ocidir-rs#73)": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, foreign, a, foreign), noPlatform)
		},
		"no platforms, another with layers from elsewhere": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, windows, a), noPlatform)
		},
		"no platforms, nested": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, edited(t, index(t, foreign), noPlatform), edited(t, index(t, foreign, a), noPlatform)), noPlatform)
		},
		"one without a platform": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, foreign, a), func(d *imagespec.Descriptor) {
				if d.Digest == a.Digest() {
					d.Platform = nil
				}
			})
		},
		"another without a platform": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, foreign, a), func(d *imagespec.Descriptor) {
				if d.Digest != a.Digest() {
					d.Platform = nil
				}
			})
		},
		"annotations": func(a *image.Artifact) *image.Artifact {
			return edited(t, index(t, a), func(d *imagespec.Descriptor) {
				d.ArtifactType, d.Data, d.Annotations = "application/x-some", []byte("{}"), map[string]string{"a": strings.Repeat("x", 1<<20)}
			})
		},
		"capitals": func(a *image.Artifact) *image.Artifact { return edited(t, index(t, a), spelled("AMD64", "")) },
	} {
		a := motd(t, name)
		outer := of(a)
		r := serve(t, "app", "1", outer)
		exact := r.Addr() + "/app@" + outer.Digest().String()
		for _, ref := range []string{r.Addr() + "/app:1", exact} {
			img, err := n.Pull(testContext(t), PullRequest{Image: ref})
			if err != nil || img.ID != a.ID() {
				t.Errorf("%s: %s: %v, %v", name, ref, img, err)
				continue
			}
			r.Forget()
			again := n.pull(ref)
			if again.ID != a.ID() {
				t.Errorf("%s: %s again: %s", name, ref, again.ID)
			}
			for blob := range a.Blobs {
				if sent := r.Sent(blob.String()); sent > 0 {
					t.Errorf("%s: %s again: %d bytes of %s were sent", name, ref, sent, blob)
				}
			}
			for _, digest := range []string{exact, r.Addr() + "/app@" + a.Digest().String()} {
				if !slices.Contains(again.RepoDigests, digest) {
					t.Errorf("%s: %s lacks %s: %q", name, ref, digest, again.RepoDigests)
				}
				if got, err := n.Image(testContext(t), digest); err != nil || got.ID != a.ID() {
					t.Errorf("%s: %s: %v", name, digest, err)
				}
			}
			if ref != exact && !slices.Contains(again.RepoTags, ref) {
				t.Errorf("%s: tags %q", name, again.RepoTags)
			}
			n.remove(a.ID())
		}
	}
	n.empty()
}

// Indexes in indexes are followed within bounds.
func TestIndexesAreBounded_GO_2026_6597(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	deep := index(t, motd(t, "deep"))
	for range 6 {
		deep = index(t, deep)
	}
	foreign := func(i int) *image.Artifact {
		return build(t, image.Image{Layers: []image.Layer{layer(t, image.Text("file", fmt.Sprint(i)))}, Platform: imagespec.Platform{OS: "linux", Architecture: "riscv64"}})
	}
	var many []*image.Artifact
	for i := range 20 {
		many = append(many, index(t, foreign(i)))
	}
	wide := edited(t, index(t, many...), func(d *imagespec.Descriptor) { d.Platform = nil })
	for name, test := range map[string]struct {
		of   *image.Artifact
		want error
	}{
		"deep": {deep, fault.Invalid}, "wide": {wide, fault.Invalid}, "none": {index(t, foreign(0)), fault.NotFound},
	} {
		r := serve(t, "app", "1", test.of)
		if _, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); !errors.Is(err, test.want) || len(r.Requests()) > 20 {
			t.Errorf("%s: %v after %d requests, want %v", name, err, len(r.Requests()), test.want)
		}
	}
	n.empty()
}

// The error for an index without an image for this node says for which platforms it has some.
func TestIndexWithoutThisPlatform_containerd_2410(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	of := func(platforms ...imagespec.Platform) *image.Artifact {
		var images []*image.Artifact
		for _, p := range platforms {
			images = append(images, build(t, image.Image{Platform: p}))
		}
		return index(t, images...)
	}
	unknown, other := imagespec.Platform{OS: "unknown", Architecture: "unknown"}, imagespec.Platform{OS: "linux", Architecture: "riscv64"}
	newer := imagespec.Platform{OS: "linux", Architecture: runtime.GOARCH, Variant: "v99"}
	for says, top := range map[string]*image.Artifact{
		"it has no image for linux/" + runtime.GOARCH + "; build":                                                    of(unknown),
		", only for linux/riscv64; build":                                                                            of(unknown, other, other),
		", only for linux/riscv64, linux/" + runtime.GOARCH + "/v99; build":                                          of(other, unknown, newer),
		", only for linux/riscv64, linux/s390x; build":                                                               edited(t, of(other, imagespec.Platform{OS: "linux", Architecture: "s390x"}), func(d *imagespec.Descriptor) { d.Platform = nil }),
		", only for linux/p0, linux/p1, linux/p2, linux/p3, linux/p4, linux/p5, linux/p6, linux/p7; build the image": of(numbered(20)...),
	} {
		r := serve(t, "app", "1", top)
		n.fails(says, r.Addr()+"/app:1", nil, fault.NotFound, says, "unknown")
	}
	n.empty()
}

func numbered(count int) (platforms []imagespec.Platform) {
	for i := range count {
		platforms = append(platforms, imagespec.Platform{OS: "linux", Architecture: fmt.Sprint("p", i)})
	}
	return platforms
}

// What a manifest says of its type counts if the registry serves it as any file.
func TestManifestServedAsAFile(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := registrytest.Start(t)
	for _, contentType := range []string{"", "text/plain; charset=utf-8", "application/json", "application/octet-stream", "binary/octet-stream"} {
		r.Heal()
		r.Inject(registry.Fault{Path: "/manifests/", Do: func(answer http.Handler, _ <-chan struct{}) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				answer.ServeHTTP(relabelled{w, contentType}, req)
			})
		}})
		a := motd(t, "x"+contentType)
		for tag, pushed := range map[string]*image.Artifact{"image": a, "index": index(t, a)} {
			r.Push("app", tag, pushed)
			if img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:" + tag}); err != nil || img.ID != a.ID() {
				t.Errorf("%q: %s: %v, %v", contentType, tag, img, err)
			}
		}
		n.remove(a.ID())
	}
	n.empty()
}

// An OCI manifest that the registry serves as Docker's is pulled if it does not say its own type. Otherwise it is
// refused, like an image served as an index, and the error blames the registry.
func TestManifestServedAsAnother_buildah_2266_buildah_575(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r := registrytest.Start(t)
	const typed = `"mediaType":"application/vnd.oci.image.manifest.v1+json",`
	for _, c := range []struct{ as, manifest, says string }{
		{image.DockerManifest, altered(plainManifest, typed, ""), ""},
		{image.DockerManifest, plainManifest, "the registry serves it as " + image.DockerManifest + ", and it is \"" + imagespec.MediaTypeImageManifest},
		{imagespec.MediaTypeImageIndex, plainManifest, "image index: the registry serves it as " + imagespec.MediaTypeImageIndex + ", and it is"},
		{image.DockerIndex, altered(plainManifest, typed, ""), "image index: the registry serves it as " + image.DockerIndex + ", and it is"},
	} {
		a := made{manifest: c.manifest, mediaType: c.as}.artifact(layer(t, image.Text("file", c.as)))
		r.Push("app", "1", a)
		switch img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); {
		case c.says == "" && (err != nil || img.ID != a.ID()):
			t.Errorf("as %s: %v, %v", c.as, img, err)
		case c.says == "":
			n.remove(img.ID)
		case !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.says):
			t.Errorf("as %s: %v, want %q", c.as, err, c.says)
		}
	}
	n.empty()
}

// relabelled is an answer with another Content-Type.
type relabelled struct {
	http.ResponseWriter
	contentType string
}

func (r relabelled) WriteHeader(status int) {
	r.Header()["Content-Type"] = []string{r.contentType}
	if r.contentType == "" {
		r.Header()["Content-Type"] = nil
	}
	r.ResponseWriter.WriteHeader(status)
}
