package pull

import (
	"context"
	"errors"
	"fmt"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/storage/artifact"
	"github.com/crius-run/crius/storage/registry/source"
)

// pullArtifact stores the artifact that src leads to, and hands it to n.take.
func (p *Puller) pullArtifact(ctx context.Context, src *source.Image, n named) error {
	if err := p.Owned(); err != nil {
		return err
	}
	if into := n.request.Into; into != nil {
		pulled, err := into(ctx, src)
		if err != nil {
			return src.Failed(err)
		}
		return n.take(ctx, Result{Artifact: pulled})
	}
	pulled, err := p.Artifacts.Pull(ctx, src, artifact.Terms{})
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
	return n.take(ctx, Result{Artifact: pulled})
}
