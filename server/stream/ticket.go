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

// tickets are the requests that wait for their client.
type tickets struct {
	mu      sync.Mutex
	waiting map[string]ticket
}

// ticket admits one client to one session.
type ticket struct {
	session any // an ExecRequest, an AttachRequest or a PortForwardRequest
	expires time.Time
}

// issue keeps session until it is redeemed, and returns the token for it.
func (t *tickets) issue(session any) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for token, waiting := range t.waiting {
		if now.After(waiting.expires) {
			delete(t.waiting, token)
		}
	}
	if len(t.waiting) >= maxTickets {
		return "", fmt.Errorf("%d sessions have been asked for and not been begun: %w", len(t.waiting), fault.Exhausted)
	}
	if t.waiting == nil {
		t.waiting = make(map[string]ticket)
	}
	token := rand.Text()
	t.waiting[token] = ticket{session, now.Add(ticketLife)}
	return token, nil
}

// redeem takes a ticket of one kind of session.
func redeem[T any](t *tickets, token string) (session T, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting, ok := t.waiting[token]
	if !ok {
		return session, false
	}
	if session, ok = waiting.session.(T); !ok {
		return session, false
	}
	delete(t.waiting, token)
	return session, time.Now().Before(waiting.expires)
}
