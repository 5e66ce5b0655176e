package artifact

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.podman.io/image/v5/docker/reference"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/panics"
	"github.com/crius-run/crius/storage/registry/source"
	"github.com/crius-run/crius/storage/registry/trust"
)

// additional are the artifacts in stores that others write and this program only reads. They are
// read now and then, in the background: they may be on a network whose server hangs, for which no
// caller may wait long.
type additional struct {
	dirs     []string      // of the stores; the first one with an artifact counts
	patience time.Duration // of callers who need the present artifacts

	mu       sync.Mutex
	known    map[string]*Artifact // by id; never changed, but replaced
	problems []string             // of the last reading
	ended    time.Time            // of the last reading
	reading  chan struct{}        // closed when the reading under way ends; nil: there is none
}

const (
	readInterval = 10 * time.Second // between two readings
	readPatience = 10 * time.Second
)

// find returns the artifact with an id, or nil.
func (a *additional) find(id string) *Artifact {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.known[id]
}

// all returns the artifacts of the last reading. If that was some time ago, it begins another.
func (a *additional) all(ctx context.Context) map[string]*Artifact {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.dirs) > 0 && time.Since(a.ended) > readInterval {
		a.begin(context.WithoutCancel(ctx))
	}
	return a.known
}

// read reads the stores, and returns when that is done or takes too long.
func (a *additional) read(ctx context.Context) {
	if len(a.dirs) == 0 {
		return
	}
	a.mu.Lock()
	done := a.begin(context.WithoutCancel(ctx))
	a.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
	case <-time.After(a.patience):
		slog.WarnContext(ctx, "additional artifact stores do not answer, going on without what is new there", "dirs", a.dirs)
	}
}

// begin reads the stores, unless that is in progress. The caller holds mu. Nobody waits for the end
// of a reading that hangs.
func (a *additional) begin(ctx context.Context) (done <-chan struct{}) {
	if a.reading != nil {
		return a.reading
	}
	ended := make(chan struct{})
	a.reading = ended
	before := a.known
	go func() {
		defer close(ended)
		var found map[string]*Artifact
		var problems []string
		panics.Run(ctx, "read additional artifact stores", func() { found, problems = a.load(before) })
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, problem := range problems {
			if !slices.Contains(a.problems, problem) {
				slog.WarnContext(ctx, "additional artifact store is unusable, or a part of it", "err", problem)
			}
		}
		a.known, a.problems, a.ended, a.reading = found, problems, time.Now(), nil
	}()
	return ended
}

// load reads the artifacts that have changed since before.
func (a *additional) load(before map[string]*Artifact) (found map[string]*Artifact, problems []string) {
	found = map[string]*Artifact{}
	kept := 0
	for _, store := range a.dirs {
		entries, err := os.ReadDir(filepath.Join(store, artifactsName))
		if err != nil {
			problems = append(problems, err.Error())
		}
		for _, entry := range entries {
			if found[entry.Name()] != nil {
				continue
			}
			one, err := loadAdditional(filepath.Join(store, artifactsName, entry.Name()), before[entry.Name()], a.patience)
			if err != nil {
				problems = append(problems, fmt.Sprintf("artifact %s in %s: %v", entry.Name(), store, err))
				continue
			}
			if kept += one.kept(); len(found) == maxArtifacts || kept > maxKept {
				return found, append(problems, fmt.Sprintf("more than %d artifacts, or their files have long names: the others are left out", maxArtifacts))
			}
			found[one.ID] = one
		}
	}
	return found, problems
}

// loadAdditional reads the artifact in a directory. It returns known if that has not changed.
func loadAdditional(dir string, known *Artifact, patience time.Duration) (*Artifact, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	if known != nil && known.dir == dir && known.changed.Equal(info.ModTime()) {
		return known, nil
	}
	one, err := load(dir)
	if err != nil {
		return nil, err
	}
	if one.Removed {
		return nil, errors.New("it has been removed there and is still in use")
	}
	one.ReadOnly, one.changed, one.remote = true, info.ModTime(), newRemote(patience)
	return one, nil
}

// CheckAdditional says why the image root of an additional store has no artifacts.
func CheckAdditional(root string) error {
	_, err := os.ReadDir(filepath.Join(In(root), artifactsName))
	return err
}

// pullAdditional returns the artifact to which src leads, if an additional store has it under the
// same name, with all signatures; else nil.
func (s *Store) pullAdditional(ctx context.Context, id string, src *source.Image) (*Artifact, error) {
	s.additional.read(ctx)
	a := s.additional.find(id)
	if a == nil || !a.knows(src) {
		return nil, nil //nolint:nilnil // see above
	}
	stored, err := a.document(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil || len(trust.Union(stored.Signatures, src.Signatures)) > len(stored.Signatures) {
		return nil, nil //nolint:nilnil,nilerr // then it is fetched
	}
	slog.InfoContext(ctx, "artifact is in an additional store", "image", id, "name", src.Name.String(), "dir", a.dir)
	return a, s.Unname(ctx, src.Name.String())
}

// knows reports whether the artifact has the name of src, and the digests that led to it.
func (a *Artifact) knows(src *source.Image) bool {
	for _, d := range src.Digests() {
		if !slices.Contains(a.Digests, d) {
			return false
		}
	}
	if _, digested := src.Name.(reference.Canonical); !digested {
		return slices.Contains(a.Names, src.Name.String())
	}
	return slices.ContainsFunc(a.Names, func(name string) bool {
		parsed, err := reference.ParseNormalizedNamed(name)
		return err == nil && parsed.Name() == src.Name.Name()
	})
}

// refuseAdditional returns an error for removing an artifact that is in an additional store.
func (s *Store) refuseAdditional(id string) error {
	if a := s.additional.find(id); a != nil {
		return fmt.Errorf("artifact %s is in a store that is only read (image.additional_artifact_stores), in %s; remove it there: %w", id, a.dir, fault.Precondition)
	}
	return nil
}
