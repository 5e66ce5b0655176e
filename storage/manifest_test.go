package storage

import (
	"archive/tar"
	"bytes"
	"errors"
	"path"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

// mediaTypes are those of all manifests and indices that the library reads.
var mediaTypes = []string{
	imagespec.MediaTypeImageManifest, manifest.DockerV2Schema2MediaType, manifest.DockerV2Schema1MediaType, manifest.DockerV2Schema1SignedMediaType,
	imagespec.MediaTypeImageIndex, manifest.DockerV2ListMediaType,
}

const emptyDigest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

// manifestText is a manifest of one layer.
func manifestText(mediaType, digest, more string) []byte {
	blob := `{"mediaType":"application/octet-stream","size":1,"digest":"` + digest + `"` + more + `}`
	return []byte(`{"schemaVersion":2,"mediaType":"` + mediaType + `","config":` + blob + `,"layers":[` + blob + `]}`)
}

// What a manifest makes crius fetch is named by digests, lies in the image's
// registry and can be mounted (CVE-2024-3727, CVE-2020-15157).
func FuzzManifest(f *testing.F) {
	for i, mediaType := range mediaTypes[:2] {
		f.Add(uint8(i), manifestText(mediaType, emptyDigest, ""))
		f.Add(uint8(i), manifestText(mediaType, "sha256:../../../etc/passwd", ""))
		f.Add(uint8(i), manifestText(mediaType, emptyDigest, `,"urls":["https://evil.example/x"]`))
	}
	f.Add(uint8(2), []byte(`{"schemaVersion":1,"name":"a","tag":"b","architecture":"amd64","fsLayers":[{"blobSum":"`+emptyDigest+`"}],"history":[{"v1Compatibility":"{\"id\":\"x\"}"}]}`))
	f.Add(uint8(0), []byte("null"))
	f.Fuzz(func(t *testing.T, kind uint8, raw []byte) {
		m, err := manifest.FromBlob(raw, mediaTypes[int(kind)%4])
		if err != nil {
			return
		}
		if err := inspectManifest(m); err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%s: %v", raw, err)
			}
			return
		}
		blobs := m.LayerInfos()
		if len(blobs) > maxLayers {
			t.Errorf("%d layers", len(blobs))
		}
		for _, layer := range blobs {
			if layer.Digest.Validate() != nil || len(layer.URLs) > 0 || layer.Size < -1 {
				t.Errorf("%s: layer %+v", raw, layer)
			}
		}
		if config := m.ConfigInfo(); !isSchema1(m) && (config.Digest.Validate() != nil || len(config.URLs) > 0) {
			t.Errorf("%s: config %+v", raw, config)
		}
	})
}

// The image that is chosen from an index is one that stands in it.
func FuzzIndex(f *testing.F) {
	entry := `{"mediaType":"` + imagespec.MediaTypeImageManifest + `","size":1,"digest":"` + emptyDigest + `","platform":{"os":"linux","architecture":"amd64"}}`
	for i, entries := range []string{entry, entry + "," + entry, "", "null", strings.Replace(entry, emptyDigest, "sha256:../x", 1), strings.Replace(entry, "amd64", "z80", 1)} {
		f.Add(uint8(i), []byte(`{"schemaVersion":2,"manifests":[`+entries+`]}`))
	}
	f.Fuzz(func(t *testing.T, kind uint8, raw []byte) {
		mediaType := mediaTypes[4+int(kind)%2]
		chosen, err := chooseInstance(&types.SystemContext{OSChoice: "linux", ArchitectureChoice: "amd64"}, raw, mediaType)
		if err != nil {
			if !errors.Is(err, fault.Invalid) && !errors.Is(err, fault.NotFound) {
				t.Errorf("%s: %v", raw, err)
			}
			return
		}
		list, err := manifest.ListFromBlob(raw, mediaType)
		if err != nil || !slices.Contains(list.Instances(), chosen) || chosen.Validate() != nil {
			t.Errorf("%s: %q, %v", raw, chosen, err)
		}
	})
}

// A layer's archive may name its files as it likes: looking for them ends, stays
// an error that says so, and changes nothing.
func FuzzLayerHeaders(f *testing.F) {
	archiveOf := func(headers ...*tar.Header) []byte {
		var out bytes.Buffer
		w := tar.NewWriter(&out)
		for _, h := range headers {
			if err := w.WriteHeader(h); err != nil {
				f.Fatal(err)
			}
		}
		return out.Bytes()
	}
	f.Add(archiveOf(&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}, &tar.Header{Name: "etc/motd", Typeflag: tar.TypeReg}))
	f.Add(archiveOf(&tar.Header{Name: "a", Typeflag: tar.TypeSymlink, Linkname: "/"}, &tar.Header{Name: "a/b/../../../c", Typeflag: tar.TypeLink, Linkname: ".."}))
	f.Add(archiveOf(&tar.Header{Name: ".wh..wh..opq", Typeflag: tar.TypeReg}, &tar.Header{Name: "x/.wh.y", Typeflag: tar.TypeReg}, &tar.Header{Name: ".wh."}))
	f.Add(archiveOf(&tar.Header{Name: "/", Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"a": "b"}}))
	f.Fuzz(func(t *testing.T, raw []byte) {
		files := map[string]*tar.Header{}
		if err := garbled(readHeaders(bytes.NewReader(raw), files)); err != nil && !certain(err) {
			t.Errorf("an archive that cannot be read is no damage: %v", err)
		}
		dir := t.TempDir()
		for name, h := range files {
			if path.Clean(name) != name || h == nil {
				t.Errorf("file %q", name)
			}
			linked := false
			for i, c := range name {
				above := files[name[:i]]
				linked = linked || c == '/' && above != nil && above.Typeflag == tar.TypeSymlink
			}
			if behindLink(files, name) != linked {
				t.Errorf("%q is behind a link: %v", name, linked)
			}
			if strings.HasPrefix(name, "..") || strings.HasPrefix(name, "/") {
				continue // of no layer in the store: the library refuses it when it is pulled
			}
			if err := errors.Join(sameFile(dir, name, h), sameMode(dir, name, h, false)); err == nil && name != "." {
				t.Errorf("%q is in an empty directory", name)
			}
		}
	})
}
