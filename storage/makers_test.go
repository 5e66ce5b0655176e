package storage

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/image"
	"github.com/crius-run/crius/test/kit/registry/registrytest"
)

// made is an image of one layer, in JSON as some builder writes it. In texts, DIFF, LAYER, SIZE, CONFIG and LENGTH are the digests
// and sizes of the layer and the config, and ARCH is the architecture.
type made struct {
	config, manifest string
	mediaType        string // of the manifest; empty: OCI
	wrong            string // part of the error; empty: the image is pulled
}

const (
	plainConfig   = `{"architecture":"ARCH","os":"linux","rootfs":{"type":"layers","diff_ids":["DIFF"]}}`
	plainManifest = `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"CONFIG","size":LENGTH},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"LAYER","size":SIZE}]}`
)

func (m made) artifact(l image.Layer) *image.Artifact {
	fill := func(text string, pairs ...string) string { return strings.NewReplacer(pairs...).Replace(text) }
	config := fill(orElse(m.config, plainConfig), "DIFF", l.DiffID.String(), "LAYER", l.Digest.String(), "ARCH", runtime.GOARCH)
	manifest := fill(orElse(m.manifest, plainManifest), "CONFIG", digest.FromString(config).String(), "LENGTH", fmt.Sprint(len(config)), "LAYER", l.Digest.String(), "SIZE", fmt.Sprint(len(l.Blob)))
	return &image.Artifact{
		MediaType: orElse(m.mediaType, imagespec.MediaTypeImageManifest), Manifest: []byte(manifest), Config: digest.FromString(config),
		Blobs: map[digest.Digest][]byte{digest.FromString(config): []byte(config), l.Digest: l.Blob},
	}
}

func orElse(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}

// altered returns plainManifest or plainConfig with something else in it.
func altered(text string, pairs ...string) string {
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			panic(pairs[i])
		}
		text = strings.Replace(text, pairs[i], pairs[i+1], 1)
	}
	return text
}

// Layers may be named by any digest, and what the store names by a digest by that of the store.
func TestDigestsOfOtherAlgorithms_moby_48241(t *testing.T) {
	t.Parallel()
	n, r := newNode(t), registrytest.Start(t)
	l := layer(t, image.Text("file", "content"))
	other := digest.SHA512.FromBytes(l.Blob)
	plain := made{}.artifact(l)
	config := digest.SHA512.FromBytes(plain.Blobs[plain.Config])
	for what, c := range map[string]struct {
		made
		change [2]string // in the manifest
		blobs  map[digest.Digest][]byte
	}{
		"layer":   {change: [2]string{l.Digest.String(), other.String()}, blobs: map[digest.Digest][]byte{other: l.Blob}},
		"config":  {made: made{wrong: "not by sha512; rebuild the image"}, change: [2]string{plain.Config.String(), config.String()}, blobs: map[digest.Digest][]byte{config: plain.Blobs[plain.Config]}},
		"content": {made: made{wrong: "not by sha512; rebuild the image", config: strings.ReplaceAll(plainConfig, "DIFF", other.String())}},
	} {
		a := c.artifact(l)
		a.Manifest = []byte(strings.ReplaceAll(string(a.Manifest), c.change[0], c.change[1]))
		maps.Copy(a.Blobs, c.blobs)
		r.Push("app", "1", a)
		switch img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"}); {
		case c.wrong != "" && (!errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), c.wrong)):
			t.Errorf("%s: %v, want %q", what, err, c.wrong)
		case c.wrong == "" && (err != nil || img.ID != a.ID()):
			t.Errorf("%s: %v, %v", what, img, err)
		case c.wrong == "":
			n.remove(img.ID)
		}
	}
	r.Push("app", "1", edited(t, index(t, plain), func(d *imagespec.Descriptor) {
		d.Digest, d.Platform = digest.SHA512.FromBytes(plain.Manifest), &imagespec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	}))
	n.fails("manifest", r.Addr()+"/app:1", nil, fault.Invalid, "image index: the digest of a manifest can only be by sha256, not by sha512; rebuild the image", "")
	n.empty()
}

// Images as builders write them are run as by other runtimes, or refused with what is wrong and what to do.
func TestImagesAsOthersMakeThem(t *testing.T) {
	t.Parallel()
	const layerType = "application/vnd.oci.image.layer.v1.tar+gzip"
	docker := altered(plainManifest, imagespec.MediaTypeImageManifest, image.DockerManifest, imagespec.MediaTypeImageConfig, image.DockerConfig, layerType, image.DockerLayer)
	config := func(pairs ...string) made { return made{config: altered(plainConfig, pairs...)} }
	manifest := func(pairs ...string) made { return made{manifest: altered(plainManifest, pairs...)} }
	dockerised := func(pairs ...string) made {
		return made{manifest: altered(docker, pairs...), mediaType: image.DockerManifest}
	}
	refused := func(why string, m made) made { m.wrong = why; return m }
	const first = `{"architecture"`
	n, r := newNode(t), registrytest.Start(t)
	for name, m := range map[string]made{
		"plain":  {},
		"docker": dockerised(),
		"config of type octet-stream (moby#48361)": dockerised(image.DockerConfig, "application/octet-stream"),
		"layer of type octet-stream":               refused("rebuild the image", dockerised(image.DockerLayer, "application/octet-stream")),
		"docker types in an OCI manifest":          refused("with the types of one of them", manifest(imagespec.MediaTypeImageConfig, image.DockerConfig, layerType, image.DockerLayer)),
		"OCI types in a docker manifest":           refused("rebuild the image", dockerised(image.DockerConfig, imagespec.MediaTypeImageConfig, image.DockerLayer, layerType)),
		"OCI without mediaType":                    manifest(`"mediaType":"application/vnd.oci.image.manifest.v1+json",`, ""),
		"layer says tar, is gzip":                  manifest(layerType, "application/vnd.oci.image.layer.v1.tar"),
		"layer says zstd, is gzip":                 manifest(layerType, "application/vnd.oci.image.layer.v1.tar+zstd"),
		"docker, zstd (docker-immich#711)":         dockerised(image.DockerLayer, "application/vnd.docker.image.rootfs.diff.tar.zstd"),
		"layer type in capitals":                   manifest(layerType, "application/vnd.oci.image.layer.v1.tar+GZIP"),
		"layer type with a parameter":              manifest(layerType, layerType+"; charset=utf-8"),
		"OCI layer of type octet-stream":           manifest(layerType, "application/octet-stream"),
		"data in the layer's descriptor":           manifest(`"size":SIZE`, `"size":SIZE,"data":"e30="`),
		"nondistributable layer without URLs":      manifest(layerType, "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"),
		"docker foreign layer without URLs":        dockerised(image.DockerLayer, "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"),
		"URLs null":                                manifest(`"size":SIZE`, `"size":SIZE,"urls":null`),
		"URLs empty":                               manifest(`"size":SIZE`, `"size":SIZE,"urls":[]`),
		"annotations null":                         manifest(`"schemaVersion":2`, `"schemaVersion":2,"annotations":null`),
		"annotation without a value":               manifest(`"schemaVersion":2`, `"schemaVersion":2,"annotations":{"a":""}`),
		"annotation null":                          manifest(`"schemaVersion":2`, `"schemaVersion":2,"annotations":{"a":null}`),
		"annotation number":                        refused("rebuild the image", manifest(`"schemaVersion":2`, `"schemaVersion":2,"annotations":{"a":5}`)),
		"layer annotations null":                   manifest(`"size":SIZE`, `"size":SIZE,"annotations":null`),
		"eStargz annotations":                      manifest(`"size":SIZE`, `"size":SIZE,"annotations":{"containerd.io/snapshot/stargz/toc.digest":"LAYER","io.containers.estargz.uncompressed-size":"1"}`),
		"subject":                                  manifest(`"schemaVersion":2`, `"schemaVersion":2,"subject":{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"LAYER","size":5}`),
		"artifactType beside a config":             manifest(`"schemaVersion":2`, `"schemaVersion":2,"artifactType":"application/vnd.example+type"`),
		"data in the config's descriptor":          manifest(`"size":LENGTH`, `"size":LENGTH,"data":"e30="`),
		"platform in the config's descriptor":      manifest(`"size":LENGTH`, `"size":LENGTH,"platform":{"architecture":"s390x","os":"zos"}`),
		"unknown fields":                           manifest(`"schemaVersion":2`, `"schemaVersion":2,"x-y":{"z":[1,null]}`),
		"schemaVersion last":                       manifest(`{"schemaVersion":2,`, `{`, `}]}`, `}],"schemaVersion":2}`),
		"spaces":                                   manifest(`{"schemaVersion":2,`, " \n\t{ \"schemaVersion\" :\r\n 2 ,"),
		"Helm chart (moby#44367)": refused("it is no container image, but an artifact with the config \"application/vnd.cncf.helm.config.v1+json\"", made{
			config:   `{"name":"chart","version":"1"}`,
			manifest: altered(plainManifest, imagespec.MediaTypeImageConfig, "application/vnd.cncf.helm.config.v1+json", layerType, "application/vnd.cncf.helm.chart.content.v1.tar+gzip"),
		}),
		"byte order mark":                          refused("no JSON", manifest(`{"schemaVersion"`, "\ufeff{\"schemaVersion\"")),
		"schemaVersion twice":                      manifest(`"schemaVersion":2`, `"schemaVersion":1,"schemaVersion":2`),
		"wrong size of the config":                 refused("but the manifest says 5; rebuild the image", manifest("LENGTH", "5")),
		"no size of the config":                    refused("but the manifest says 0; rebuild the image", manifest(`,"size":LENGTH`, "")),
		"no size of the layer":                     refused("layer 0 has a size of 0", manifest(`,"size":SIZE`, "")),
		"size as a string":                         refused("rebuild the image", manifest("SIZE", `"SIZE"`)),
		"layers null":                              refused("it has 0 layers, but its config names 1", manifest(`[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"LAYER","size":SIZE}]`, "null")),
		"capital digest":                           refused("digest \"SHA256:abc\" of layer 0", manifest("LAYER", "SHA256:abc")),
		"history missing":                          config(),
		"history null":                             config(first, `{"history":null,"architecture"`),
		"history of another length (buildah#4025)": config(first, `{"history":[{"created_by":"a"},{"created_by":"b"},{"created_by":"c"}],"architecture"`),
		"history all empty layers":                 config(first, `{"history":[{"empty_layer":true}],"architecture"`),
		"history entries null":                     config(first, `{"history":[null],"architecture"`),
		"created of year 1":                        config(first, `{"created":"0001-01-01T00:00:00Z","architecture"`),
		"created empty":                            refused("rebuild the image", config(first, `{"created":"","architecture"`)),
		"created null":                             config(first, `{"created":null,"architecture"`),
		"created no time":                          refused("rebuild the image", config(first, `{"created":"yesterday","architecture"`)),
		"created far away":                         config(first, `{"created":"9999-12-31T23:59:59Z","architecture"`),
		"created number":                           refused("rebuild the image", config(first, `{"created":1700000000,"architecture"`)),
		"config null":                              config(first, `{"config":null,"architecture"`),
		"config empty":                             config(first, `{"config":{},"architecture"`),
		"all of config null":                       config(first, `{"config":{"User":null,"Env":null,"Entrypoint":null,"Cmd":null,"WorkingDir":null,"Labels":null,"Volumes":null,"ExposedPorts":null,"OnBuild":null,"StopSignal":null,"Healthcheck":null,"Shell":null},"architecture"`),
		"entrypoint as a string":                   refused("rebuild the image", config(first, `{"config":{"Entrypoint":"/bin/sh"},"architecture"`)),
		"cmd as a string":                          refused("rebuild the image", config(first, `{"config":{"Cmd":"sh"},"architecture"`)),
		"env as a map":                             refused("rebuild the image", config(first, `{"config":{"Env":{"A":"b"}},"architecture"`)),
		"exposed ports null values":                config(first, `{"config":{"ExposedPorts":{"80/tcp":null},"Volumes":{"/data":null}},"architecture"`),
		"exposed ports odd":                        config(first, `{"config":{"ExposedPorts":{"80-90":{},"":{},"x/y/z":{}}},"architecture"`),
		"labels with numbers":                      refused("rebuild the image", config(first, `{"config":{"Labels":{"a":1}},"architecture"`)),
		"user number":                              refused("rebuild the image", config(first, `{"config":{"User":1000},"architecture"`)),
		"healthcheck":                              config(first, `{"config":{"Healthcheck":{"Test":["NONE"],"Interval":-5}},"architecture"`),
		"lower-case keys":                          config(first, `{"config":{"user":"1000","entrypoint":["/bin/x"]},"architecture"`),
		"container_config":                         config(first, `{"container_config":{"Cmd":["/bin/sh","-c","#(nop)"]},"docker_version":"1.9","id":"x","parent":"y","architecture"`),
		"unknown field of the config":              config(first, `{"config":{"X":[1]},"moby.buildkit.buildinfo.v1":"e30=","architecture"`),
		"no architecture":                          config(`"architecture":"ARCH",`, ""),
		"architecture empty":                       config(`"ARCH"`, `""`),
		"no os":                                    config(`"os":"linux",`, ""),
		"os capital":                               config(`"linux"`, `"Linux"`),
		"variant":                                  config(first, `{"variant":"v9","architecture"`),
		"os.features":                              config(first, `{"os.version":"10.0","os.features":["win32k"],"architecture"`),
		"rootfs without a type":                    config(`"type":"layers",`, ""),
		"rootfs of another type":                   config(`"layers"`, `"layers+base"`),
		"rootfs missing":                           refused("its config names 0", config(`,"rootfs":{"type":"layers","diff_ids":["DIFF"]}`, "")),
		"rootfs null":                              refused("its config names 0", config(`{"type":"layers","diff_ids":["DIFF"]}`, "null")),
		"digest of the blob (lifecycle#1662)":      refused("but the image's config says", config("DIFF", "LAYER")),
		"too many diff_ids":                        refused("its config names 2", config(`"DIFF"`, `"DIFF","DIFF"`)),
	} {
		a := m.artifact(layer(t, image.Text("file", name)))
		r.Push("app", "1", a)
		img, err := n.Pull(testContext(t), PullRequest{Image: r.Addr() + "/app:1"})
		if m.wrong != "" {
			if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), m.wrong) {
				t.Errorf("%s: %v, want %q", name, err, m.wrong)
			}
			continue
		}
		if err != nil || img.ID != a.ID() {
			t.Errorf("%s: %+v, %v", name, img, err)
			continue
		}
		c := n.rootfs("c", img.ID)
		n.mount(c)
		if got := n.read(c, "file"); got != name {
			t.Errorf("%s: the file has %q", name, got)
		}
		n.removeRootfs(c)
		ok(t, n.Remove(testContext(t), img.ID))
	}
}
