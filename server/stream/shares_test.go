package stream

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// fill takes all places that a namespace gets for so many containers.
func fill(s *shares, namespace string, containers int) (taken int) {
	for again := true; again; {
		again = false
		for i := range containers {
			if s.take(party{namespace, fmt.Sprint(namespace, i)}, 1) {
				taken++
				again = true
			}
		}
	}
	return taken
}

// A namespace that is alone gets nearly all places.
func TestSharesKeepPlacesForOthers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ most, containers, atLeast int }{
		{512, 1, 400}, {512, 4, 410}, {512, 20, 430}, {512, 600, 460}, {100, 1, 80}, {100, 10, 80}, {16, 1, 15}, {15, 1, 15}, {2, 1, 2}, {1, 1, 1},
	} {
		s := newShares(c.most)
		taken := fill(s, "first", c.containers)
		if taken < c.atLeast || c.most >= 16 && taken >= c.most {
			t.Errorf("%d containers of one namespace took %d of %d", c.containers, taken, c.most)
		}
		if c.most < 16 {
			continue
		}
		if !s.admits(party{"second", "new"}) {
			t.Errorf("%d of %d: another namespace gets none", taken, c.most)
		}
	}
}

// However many come one after the other, each of which takes what it can, the next one gets some.
func TestSharesForManyNamespaces(t *testing.T) {
	t.Parallel()
	s := newShares(512)
	for i := range 20 {
		if taken := fill(s, fmt.Sprint("namespace", i), 10); taken == 0 {
			t.Fatalf("namespace %d gets none of %d places, %d of which are taken", i, s.most, s.sum)
		}
	}
}

// In a namespace it is the same among containers.
func TestSharesOfANamespace(t *testing.T) {
	t.Parallel()
	s := newShares(512)
	for i := range 12 {
		p := party{"one", fmt.Sprint(i)}
		taken := 0
		for s.take(p, 1) {
			taken++
		}
		if taken == 0 {
			t.Fatalf("container %d gets none, while the others have %d", i, s.sum)
		}
	}
}

func TestSharesTakeAllOrNothing(t *testing.T) {
	t.Parallel()
	s := newShares(10)
	p := party{"a", "b"}
	if s.take(p, 11) || s.sum != 0 || len(s.targets)+len(s.namespaces) != 0 {
		t.Errorf("more than there are: %+v", s)
	}
	if !s.take(p, 4) || s.sum != 4 {
		t.Errorf("some: %+v", s)
	}
}

// flood asks for sessions of four containers of one tenant until all of them are refused.
func flood(t *testing.T, box *tickets, redeemed bool) {
	t.Helper()
	for again := true; again; {
		again = false
		for i := range 4 {
			p := party{"greedy", fmt.Sprint(i)}
			box.mu.Lock()
			_, full := box.full(p)
			box.mu.Unlock()
			if full != nil {
				continue
			}
			token, err := box.issue(t.Context(), p, &cri.ExecRequest{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if redeemed {
				if _, _, _, ok := redeem[*cri.ExecRequest](box, token); !ok {
					t.Fatal("the token is not good")
				}
			}
			again = true
		}
	}
}

// One tenant must not hold all sessions, all pending requests, or all places in which
// requests wait: four containers of 128 each were all 512 sessions.
func TestOneTenantCannotHoldAllSessions(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		box      *tickets
		redeemed bool
		reason   string
	}{
		"sessions": {newTickets(512, 128), true, refusedNode},
		"pending":  {newTickets(0, 0), false, refusedPending},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				flood(t, c.box, c.redeemed)
				waiting := 0
				for c.box.queue.admits(party{"greedy", "0"}) {
					c.box.queue.count(party{"greedy", "0"}, 1)
					waiting++
				}
				for i := range 20 {
					if _, err := c.box.issue(t.Context(), party{"modest", fmt.Sprint(i % 2)}, &cri.ExecRequest{}, nil); err != nil {
						t.Errorf("session %d of another tenant: %v", i, err)
					}
				}
				if _, err := c.box.issue(t.Context(), party{"greedy", "0"}, &cri.ExecRequest{}, nil); !errors.Is(err, fault.Exhausted) {
					t.Errorf("one too many: %v", err)
				}
				if c.box.refused.snapshot()[c.reason] == 0 {
					t.Errorf("not counted: %v", c.box.refused.snapshot())
				}
				if !c.box.queue.admits(party{"modest", "0"}) {
					t.Errorf("all places to wait are taken by %d of one tenant", waiting)
				}
			})
		})
	}
}

func TestOneTenantCannotHoldAllForwards(t *testing.T) {
	t.Parallel()
	f := &forwards{places: newShares(maxForwardsInSum)}
	fill(f.places, "greedy", 10)
	if !f.take(party{"modest", "x"}, 10) {
		t.Errorf("another tenant gets none: %d of %d are taken", f.places.sum, maxForwardsInSum)
	}
}
