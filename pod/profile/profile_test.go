package profile

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/storage"
)

// store notes what it is asked for.
type store struct {
	has   string
	admit error
	pull  error
	calls []string
}

func (s *store) Image(_ context.Context, ref string) (*storage.Image, error) {
	if ref != s.has {
		return nil, fault.NotFound
	}
	return &storage.Image{ID: "id"}, nil
}

func (s *store) Admit(_ context.Context, use storage.Use) error {
	s.calls = append(s.calls, "admit "+use.ImageID+" "+use.Name+" "+use.Namespace)
	return s.admit
}

func (s *store) Pull(ctx context.Context, req storage.PullRequest) (*storage.Image, error) {
	if _, bounded := ctx.Deadline(); !bounded || req.Kind != &kind || req.Auth != nil {
		return nil, errors.New("a pull without bounds")
	}
	s.calls = append(s.calls, "pull "+req.Image+" "+req.Namespace)
	return &storage.Image{ID: "id"}, s.pull
}

// The registry is asked, but for what is here by digest and is admitted.
func TestFind(t *testing.T) {
	t.Parallel()
	const tagged, digested = "a.test/p:1", "a.test/p@sha256:1"
	for _, c := range []struct {
		store store
		ref   string
		want  []string
	}{
		{store{has: tagged}, tagged, []string{"pull a.test/p:1 ns"}},
		{store{has: digested}, digested, []string{"admit id a.test/p@sha256:1 ns"}},
		{store{}, digested, []string{"pull a.test/p@sha256:1 ns"}},
		{store{has: digested, admit: fault.Denied}, digested, []string{"admit id a.test/p@sha256:1 ns", "pull a.test/p@sha256:1 ns"}},
	} {
		if _, err := find(t.Context(), &c.store, c.ref, "ns"); err != nil || !slices.Equal(c.store.calls, c.want) {
			t.Errorf("%+v: %v; want %q", c.store, err, c.want)
		}
	}
	failing := store{pull: fault.Unavailable}
	if _, err := Load(t.Context(), &failing, tagged, "ns"); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), tagged) {
		t.Errorf("a registry that is down: %v", err)
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	if p, err := parse([]byte(`{"defaultAction": "SCMP_ACT_LOG"}`)); err != nil || p.DefaultAction != "SCMP_ACT_LOG" {
		t.Errorf("%+v, %v", p, err)
	}
	for content, kind := range map[string]error{
		"": fault.Invalid, `{"defaultAction": "X"}`: fault.Invalid,
		`{"defaultAction": "SCMP_ACT_NOTIFY", "listenerPath": "/run/containerd/containerd.sock"}`: fault.Denied,
	} {
		if p, err := parse([]byte(content)); !errors.Is(err, kind) {
			t.Errorf("%s: %+v, %v; want %v", content, p, err, kind)
		}
	}
}
