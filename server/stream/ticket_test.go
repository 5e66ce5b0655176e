package stream

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

func TestTickets(t *testing.T) {
	t.Parallel()
	var box tickets
	request := &cri.ExecRequest{ContainerId: "x"}
	token, err := box.issue(request)
	if err != nil {
		t.Fatal(err)
	}
	const bits, each = 128, 5 // of a base32 character
	if len(token)*each < bits {
		t.Errorf("token %q has %d bits", token, len(token)*each)
	}
	if _, ok := redeem[*cri.AttachRequest](&box, token); ok {
		t.Error("exec's token is good for attach")
	}
	if _, ok := redeem[*cri.ExecRequest](&box, token+"A"); ok {
		t.Error("another token is good")
	}
	if got, ok := redeem[*cri.ExecRequest](&box, token); !ok || got != request {
		t.Errorf("redeemed %v, %v", got, ok)
	}
	if _, ok := redeem[*cri.ExecRequest](&box, token); ok {
		t.Error("a token is good twice")
	}
}

func TestTicketsExpire(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var box tickets
		issue := func() string {
			token, err := box.issue(&cri.ExecRequest{})
			if err != nil {
				t.Fatal(err)
			}
			return token
		}
		good, stale := issue(), issue()
		time.Sleep(ticketLife - time.Second)
		if _, ok := redeem[*cri.ExecRequest](&box, good); !ok {
			t.Error("not good for a minute")
		}
		time.Sleep(2 * time.Second)
		if _, ok := redeem[*cri.ExecRequest](&box, stale); ok {
			t.Error("good for more than a minute")
		}
		for range maxTickets {
			issue()
		}
		if _, err := box.issue(&cri.ExecRequest{}); !errors.Is(err, fault.Exhausted) {
			t.Errorf("one too many: %v", err)
		}
		time.Sleep(ticketLife + time.Second)
		issue() // there is room again
		if n := len(box.waiting); n != 1 {
			t.Errorf("%d tickets are kept, want 1", n)
		}
	})
}
