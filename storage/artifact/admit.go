package artifact

import (
	"context"
	"os"
	"path/filepath"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/types"

	"github.com/crius-run/crius/storage/registry/hosts"
	"github.com/crius-run/crius/storage/registry/trust"
)

// Admit asks a signature policy about an artifact under the name of ref. A refusal is
// trust.ErrSignature.
func (s *Store) Admit(ctx context.Context, policy *trust.Policy, a *Artifact, ref types.ImageReference) error {
	content, err := s.Manifest(ctx, a)
	if err != nil {
		return err
	}
	stored, err := a.document(ctx)
	if err != nil {
		return err
	}
	dir, end, err := hosts.MakeDir(s.cfg.RunRoot) // not beside the artifacts, whose disk may be full
	if err != nil {
		return err
	}
	defer end()
	signed, err := trust.WithSignatures(ctx, unsigned{ref, content}, stored.Signatures, dir)
	if err != nil {
		return err
	}
	return policy.Check(ctx, signed)
}

// Manifest returns the manifest of an artifact.
func (s *Store) Manifest(ctx context.Context, a *Artifact) ([]byte, error) {
	return read(ctx, a.remote, a.dir, func() ([]byte, error) { return os.ReadFile(filepath.Join(a.dir, manifestName)) })
}

// unsigned is an artifact for trust.WithSignatures.
type unsigned struct {
	ref     types.ImageReference
	content []byte
}

// Reference implements types.UnparsedImage.
func (u unsigned) Reference() types.ImageReference { return u.ref }

// Manifest implements types.UnparsedImage.
func (u unsigned) Manifest(context.Context) ([]byte, string, error) {
	return u.content, imagespec.MediaTypeImageManifest, nil
}

// Signatures implements types.UnparsedImage.
func (u unsigned) Signatures(context.Context) ([][]byte, error) { return nil, nil }
