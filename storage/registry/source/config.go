package source

import (
	"bytes"
	"encoding/json"
	"fmt"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	cstorage "go.podman.io/storage"

	"github.com/crius-run/crius/internal/fault"
)

// Limits of an image's config, far above those of real images: the largest have a bill of materials
// of a few hundred kilobytes in a label, and a few thousand tokens of history.
const (
	MaxConfig       = 4 << 20 // bytes; the library has the same limit
	MaxConfigTokens = 100_000 // JSON tokens: 4 MiB of {} take 170 MiB when parsed
	MaxUser         = 1 << 10 // bytes of its User, which is in every list of images
)

// CheckConfig refuses a config that takes much memory. It does not check that the config is valid.
func CheckConfig(raw []byte) error {
	if len(raw) > MaxConfig {
		return fmt.Errorf("image config: it has more than %d bytes; rebuild the image with fewer or shorter labels: %w", MaxConfig, fault.Invalid)
	}
	if err := checkTokens(raw); err != nil {
		return fmt.Errorf("image config: %w", err)
	}
	var spec imagespec.Image
	_ = json.Unmarshal(raw, &spec) // an invalid config has no user
	return CheckUser(spec.Config.User)
}

// checkTokens refuses JSON that takes much memory when it is parsed.
func checkTokens(raw []byte) error {
	tokens := json.NewDecoder(bytes.NewReader(raw))
	for count := 1; ; count++ {
		if _, err := tokens.Token(); err != nil {
			return nil //nolint:nilerr // others check that it is valid
		}
		if count > MaxConfigTokens {
			return fmt.Errorf("it has more than %d JSON tokens; rebuild the image with fewer labels, variables and steps: %w", MaxConfigTokens, fault.Invalid)
		}
	}
}

// CheckUser refuses an image's user that is too long to be listed.
func CheckUser(user string) error {
	if len(user) > MaxUser {
		return fmt.Errorf("image config: its user has %d bytes, more than %d; rebuild the image with a shorter USER: %w", len(user), MaxUser, fault.Invalid)
	}
	return nil
}

// StoredConfig returns the config of a stored image with this manifest, or nil if the manifest is in a
// format for which only the library knows it, or the config is not whole.
func StoredConfig(store cstorage.Store, id string, content []byte) []byte {
	var m imagespec.Manifest
	if json.Unmarshal(content, &m) != nil || m.Config.Digest.Validate() != nil {
		return nil
	}
	switch manifest.GuessMIMEType(content) {
	case imagespec.MediaTypeImageManifest:
		if m.Config.MediaType != imagespec.MediaTypeImageConfig {
			return nil
		}
	case manifest.DockerV2Schema2MediaType:
	default:
		return nil
	}
	config, err := store.ImageBigData(id, m.Config.Digest.String())
	if err != nil || m.Config.Digest.Algorithm().FromBytes(config) != m.Config.Digest {
		return nil
	}
	return config
}
