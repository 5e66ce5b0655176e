package stream

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestTickets(t *testing.T) {
	t.Parallel()
	box := newTickets(0, 0)
	request := &cri.ExecRequest{ContainerId: "x"}
	token, err := box.issue(t.Context(), party{target: "x"}, request, nil)
	if err != nil {
		t.Fatal(err)
	}
	const bits, each = 128, 5 // of a base32 character
	if len(token)*each < bits {
		t.Errorf("token %q has %d bits", token, len(token)*each)
	}
	if _, _, _, ok := redeem[*cri.AttachRequest](box, token); ok {
		t.Error("exec's token is good for attach")
	}
	if _, _, _, ok := redeem[*cri.ExecRequest](box, token+"A"); ok {
		t.Error("another token is good")
	}
	if got, _, _, ok := redeem[*cri.ExecRequest](box, token); !ok || got != request {
		t.Errorf("redeemed %v, %v", got, ok)
	}
	if _, _, _, ok := redeem[*cri.ExecRequest](box, token); ok {
		t.Error("a token is good twice")
	}
}

func TestTicketsExpire(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		box := newTickets(0, 0)
		issue := func() string {
			token, err := box.issue(t.Context(), party{target: "x"}, &cri.ExecRequest{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			return token
		}
		good, stale := issue(), issue()
		time.Sleep(ticketLife - time.Second)
		if _, _, _, ok := redeem[*cri.ExecRequest](box, good); !ok {
			t.Error("not good for a minute")
		}
		time.Sleep(2 * time.Second)
		if _, _, _, ok := redeem[*cri.ExecRequest](box, stale); ok {
			t.Error("good for more than a minute")
		}
		for box.pending.admits(party{target: "x"}) {
			issue()
		}
		if _, err := box.issue(t.Context(), party{target: "x"}, &cri.ExecRequest{}, nil); !errors.Is(err, fault.Exhausted) {
			t.Errorf("one too many: %v", err)
		}
		time.Sleep(ticketLife + time.Second)
		issue() // there is room again
		if n := len(box.waiting); n != 1 {
			t.Errorf("%d tickets are kept, want 1", n)
		}
	})
}

// Sessions that wait for their client and sessions that run count alike, until
// they end or expire.
func TestSessionsAreCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		box := newTickets(5, 3)
		issue := func(target string) (string, error) {
			return box.issue(t.Context(), party{target, target}, &cri.ExecRequest{}, nil)
		}
		var ends []func()
		begin := func(target string) {
			t.Helper()
			token, err := issue(target)
			if err != nil {
				t.Fatal(err)
			}
			_, _, end, ok := redeem[*cri.ExecRequest](box, token)
			if !ok {
				t.Fatal("the token is not good")
			}
			ends = append(ends, end)
		}
		refused := func(target, why string) {
			t.Helper()
			if _, err := issue(target); !errors.Is(err, fault.Exhausted) || !strings.Contains(err.Error(), why) {
				t.Errorf("one too many for %s: %v", target, err)
			}
		}
		begin("a")
		begin("a")
		if _, err := issue("a"); err != nil { // and nobody comes
			t.Fatal(err)
		}
		refused("a", " of a: end some, or raise api.stream_max_sessions_per_container")
		begin("b")
		begin("b")
		refused("c", "api.stream_max_sessions:")
		ends[3]()
		begin("c")
		refused("b", "api.stream_max_sessions:")
		time.Sleep(ticketLife + time.Second)
		begin("a") // in the place of what has expired
		refused("a", "api.stream_max_sessions_per_container")
		for i, end := range ends {
			if i != 3 {
				end()
			}
		}
		if box.open.sum != 0 || len(box.open.targets) != 0 || len(box.open.namespaces) != 0 || box.pending.sum != 0 {
			t.Errorf("sessions are left: %+v, %+v", box.open, box.pending)
		}
	})
}

// A session that is about to end makes room for who asks meanwhile: a client that begins
// one session after the other is not refused because the last one is still closing.
func TestIssueWaitsForASessionToEnd(t *testing.T) {
	t.Parallel()
	for name, box := range map[string]*tickets{"of the node": newTickets(1, 0), "of a container": newTickets(0, 1)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { issueWaits(t, box) })
		})
	}
}

func issueWaits(t *testing.T, box *tickets) {
	issue := func(ctx context.Context) (token string, took time.Duration, err error) {
		began := time.Now()
		token, err = box.issue(ctx, party{target: "x"}, &cri.ExecRequest{}, nil)
		return token, time.Since(began), err
	}
	token, _, err := issue(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, _, end, ok := redeem[*cri.ExecRequest](box, token)
	if !ok {
		t.Fatal("the token is not good")
	}
	if _, took, err := issue(t.Context()); !errors.Is(err, fault.Exhausted) || took != placeWait {
		t.Errorf("while the session runs: %v after %v", err, took)
	}
	impatient, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, took, err := issue(impatient); !errors.Is(err, fault.Exhausted) || took != time.Second {
		t.Errorf("while the caller waits: %v after %v", err, took)
	}
	crowd := party{"others", "y"}
	box.queue.count(crowd, maxQueue)
	if _, took, err := issue(t.Context()); !errors.Is(err, fault.Exhausted) || took != 0 {
		t.Errorf("while many wait: %v after %v", err, took)
	}
	box.queue.count(crowd, -maxQueue)
	time.AfterFunc(time.Second, end)
	if _, took, err := issue(t.Context()); err != nil || took != time.Second {
		t.Errorf("when the session has ended: %v after %v", err, took)
	}
	time.Sleep(ticketLife - placeWait + time.Second)
	if _, _, err := issue(t.Context()); err != nil {
		t.Errorf("when a ticket expires meanwhile: %v", err)
	}
	if box.queue.sum != 0 {
		t.Errorf("%d callers still wait", box.queue.sum)
	}
}

// A client that connects makes room for the next one to be awaited.
func TestIssueWaitsForAClientToConnect(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		box := newTickets(0, 0)
		p := party{"one", "x"}
		var token string
		for box.pending.admits(p) {
			var err error
			if token, err = box.issue(t.Context(), p, &cri.ExecRequest{}, nil); err != nil {
				t.Fatal(err)
			}
		}
		time.AfterFunc(time.Second, func() { _, _, _, _ = redeem[*cri.ExecRequest](box, token) })
		began := time.Now()
		if _, err := box.issue(t.Context(), p, &cri.ExecRequest{}, nil); err != nil || time.Since(began) != time.Second {
			t.Errorf("issued after %s: %v", time.Since(began), err)
		}
	})
}
