package source

import (
	"errors"
	"slices"
	"strings"
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/internal/fault"
)

// mediaTypes are the media types of all manifests and indexes that the library reads.
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
		if len(blobs) > MaxFiles || len(blobs) > MaxLayers && !isArtifact(m) {
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
