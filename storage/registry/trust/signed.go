package trust

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/directory"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/types"
)

// WithSignatures returns an image for Policy.Check that has blobs, in the form of Blobs, instead of
// its own signatures. The library sees sigstore signatures only in its own sources, so they pass
// through a directory below temporary, which is removed afterwards.
func WithSignatures(ctx context.Context, of types.UnparsedImage, blobs [][]byte, temporary string) (types.UnparsedImage, error) {
	dir, err := os.MkdirTemp(temporary, "signed-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }() // else it goes with temporary
	manifest, _, err := of.Manifest(ctx)
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{"manifest.json": manifest}
	for i, blob := range blobs {
		files[fmt.Sprintf("signature-%d", i+1)] = blob
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return nil, err
		}
	}
	ref, err := directory.NewReference(dir)
	if err != nil {
		return nil, err
	}
	src, err := ref.NewImageSource(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = src.Close() }()
	signed := image.UnparsedInstance(src, nil) // keeps what it has read
	if _, _, err := signed.Manifest(ctx); err != nil {
		return nil, err
	}
	if _, err := signed.UntrustedSignatures(ctx); err != nil {
		return nil, err
	}
	return image.UnparsedInstanceWithReference(signed, of.Reference()), nil
}
