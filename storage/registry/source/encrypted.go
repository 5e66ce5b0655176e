package source

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage/registry/decrypt"
)

// Unlock decrypts the keys of the image's encrypted layers with those of the node, from a
// directory. From then on the layers come decrypted; their digests remain those of the registry. If
// the node has no key for one, Unlock closes the image.
func (s *Image) Unlock(ctx context.Context, keys string) error {
	err := s.unlock(ctx, keys)
	if err != nil {
		return errors.Join(err, s.Close())
	}
	return nil
}

func (s *Image) unlock(ctx context.Context, dir string) error {
	if len(s.Files) > 0 { // files of artifacts are not decrypted
		return nil
	}
	parsed, err := s.parsed()
	if err != nil {
		return err
	}
	blobs := parsed.LayerInfos()
	if !decrypt.Any(blobs) {
		return nil
	}
	if len(s.Layers()) == 0 {
		return fmt.Errorf("image manifest: it has encrypted layers, and layers of an unknown format: %w", fault.Invalid)
	}
	keys, err := decrypt.ReadKeys(dir, decrypt.Option)
	if err != nil {
		return fmt.Errorf("the image is encrypted: %w", err)
	}
	s.encrypted = map[digest.Digest]*decrypt.Layer{}
	for i, blob := range blobs {
		if _, encrypted := decrypt.Plain(blob.MediaType); !encrypted || s.encrypted[blob.Digest] != nil {
			continue
		}
		if s.encrypted[blob.Digest], err = keys.Layer(ctx, blob.BlobInfo); err != nil {
			return fmt.Errorf("encrypted layer %d: %w", i, err)
		}
	}
	return nil
}

// Decrypts reports whether a layer comes decrypted.
func (s *Image) Decrypts(layer digest.Digest) bool { return s.encrypted[layer] != nil }

// decrypted returns the content of a layer whose blob comes.
func (s *Image) decrypted(layer digest.Digest, blob io.ReadCloser) io.ReadCloser {
	if one := s.encrypted[layer]; one != nil {
		return one.Open(blob)
	}
	return blob
}
