package source

import (
	"encoding/json"

	"github.com/opencontainers/go-digest"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
)

// LayerDigests are the digests by which a copy of the image may find its layers in a
// store: those of their blobs and, where the config has them, of their content, whatever
// format they are in.
func (d *Documents) LayerDigests() (digests []digest.Digest) {
	document, found := d.Manifests[d.Manifest()]
	if !found {
		document = d.Manifests[""]
	}
	if parsed, err := manifest.FromBlob(document.Content, document.MediaType); err == nil {
		for _, blob := range parsed.LayerInfos() {
			digests = append(digests, blob.Digest)
		}
	}
	var config imagespec.Image
	if json.Unmarshal(d.Config, &config) == nil {
		digests = append(digests, config.RootFS.DiffIDs...)
	}
	return digests
}
