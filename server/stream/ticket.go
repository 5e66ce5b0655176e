package stream

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

const (
	ticketLife = time.Minute
	maxTickets = 1000 // that wait to be used
)

// tickets are the requests that wait for their client, and the sessions that
// have begun.
type tickets struct {
	most     int // sessions, waiting and begun; 0: any number
	mostEach int // of them that a container or pod may have; 0: any number

	mu      sync.Mutex
	waiting map[string]ticket
	open    map[string]int // sessions, by container or pod
	sum     int
}

// ticket admits one client to one session.
type ticket struct {
	target  string // the container or pod
	session any    // an ExecRequest, an AttachRequest or a PortForwardRequest
	expires time.Time
}

// issue keeps session until it is redeemed, and returns the token for it.
func (t *tickets) issue(target string, session any) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for token, waiting := range t.waiting {
		if now.After(waiting.expires) {
			delete(t.waiting, token)
			t.count(waiting.target, -1)
		}
	}
	switch {
	case len(t.waiting) >= maxTickets:
		return "", fmt.Errorf("too many pending sessions (%d): %w", len(t.waiting), fault.Exhausted)
	case t.mostEach > 0 && t.open[target] >= t.mostEach:
		return "", fmt.Errorf("too many sessions of %s (%d): end some, or raise api.stream_max_sessions_per_container: %w",
			target, t.open[target], fault.Exhausted)
	case t.most > 0 && t.sum >= t.most:
		return "", fmt.Errorf("too many exec, attach and port-forward sessions on this node (%d): end some, or raise api.stream_max_sessions: %w",
			t.sum, fault.Exhausted)
	}
	if t.waiting == nil {
		t.waiting, t.open = make(map[string]ticket), make(map[string]int)
	}
	token := rand.Text()
	t.waiting[token] = ticket{target, session, now.Add(ticketLife)}
	t.count(target, 1)
	return token, nil
}

func (t *tickets) count(target string, n int) {
	t.sum += n
	if t.open[target] += n; t.open[target] == 0 {
		delete(t.open, target)
	}
}

// redeem takes a ticket of one kind of session. The caller must call end when the
// session has ended.
func redeem[T any](t *tickets, token string) (session T, end func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting, ok := t.waiting[token]
	if !ok {
		return session, nil, false
	}
	if session, ok = waiting.session.(T); !ok {
		return session, nil, false
	}
	delete(t.waiting, token)
	if !time.Now().Before(waiting.expires) {
		t.count(waiting.target, -1)
		return session, nil, false
	}
	return session, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.count(waiting.target, -1)
	}, true
}
