package pull

import (
	"context"
	"errors"
	"fmt"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/registry/source"
)

// pullArtifact stores the artifact that src leads to, and hands it to take.
func (p *Puller) pullArtifact(ctx context.Context, src *source.Image, take func(context.Context, Result) error) error {
	if err := p.Owned(); err != nil {
		return err
	}
	pulled, err := p.Artifacts.Pull(ctx, src)
	if err != nil {
		return src.Failed(err)
	}
	taken, err := artifact.TakeName(p.Library, src.Name.String())
	if err == nil && taken {
		err = trace.Do(ctx, "write store manifest", p.Manifest.Write)
	}
	if err != nil {
		err = fmt.Errorf("take the name from the image that had it: %w", err)
		return errors.Join(err, p.Artifacts.Unname(ctx, src.Name.String())) // so that not both have it
	}
	return take(ctx, Result{Artifact: pulled})
}
