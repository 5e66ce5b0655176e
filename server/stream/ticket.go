package stream

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

const (
	ticketLife = time.Minute
	maxTickets = 1000 // that wait to be used

	// placeWait is how long issue waits for a session to end. Whoever begins one session
	// after the other must not be refused because the last one's connection is still
	// being closed: with a client that has everything linger takes two moments at most.
	placeWait = 2*moment + time.Second
	maxQueue  = 100 // callers that wait
)

// tickets are the requests that wait for their client, and the sessions that
// have begun, until their connections are closed.
type tickets struct {
	most     int // sessions, waiting and begun; 0: any number
	mostEach int // of them that a container or pod may have; 0: any number

	mu      sync.Mutex
	freed   sync.Cond // a session has ended
	queue   int       // callers that wait for that
	waiting map[string]ticket
	open    map[string]int // sessions, by container or pod
	sum     int
}

func newTickets(most, mostEach int) *tickets {
	t := &tickets{most: most, mostEach: mostEach, waiting: make(map[string]ticket), open: make(map[string]int)}
	t.freed.L = &t.mu
	return t
}

// ticket admits one client to one session.
type ticket struct {
	target  string // the container or pod
	session any    // an ExecRequest, an AttachRequest or a PortForwardRequest
	expires time.Time
}

// issue keeps session until it is redeemed, and returns the token for it. Where there
// are too many sessions it waits for one to end, up to placeWait or the end of ctx.
func (t *tickets) issue(ctx context.Context, target string, session any) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire()
	if t.full(target) != nil && t.queue < maxQueue {
		t.await(ctx, target)
	}
	if len(t.waiting) >= maxTickets {
		return "", fmt.Errorf("too many pending sessions (%d): %w", len(t.waiting), fault.Exhausted)
	}
	if err := t.full(target); err != nil {
		return "", err
	}
	token := rand.Text()
	t.waiting[token] = ticket{target, session, time.Now().Add(ticketLife)}
	t.count(target, 1)
	return token, nil
}

// expire forgets tickets for which nobody has come.
func (t *tickets) expire() {
	now := time.Now()
	for token, waiting := range t.waiting {
		if now.After(waiting.expires) {
			delete(t.waiting, token)
			t.count(waiting.target, -1)
		}
	}
}

// full says why target may not have another session.
func (t *tickets) full(target string) error {
	switch {
	case t.mostEach > 0 && t.open[target] >= t.mostEach:
		return fmt.Errorf("too many sessions of %s (%d): end some, or raise api.stream_max_sessions_per_container: %w",
			target, t.open[target], fault.Exhausted)
	case t.most > 0 && t.sum >= t.most:
		return fmt.Errorf("too many exec, attach and port-forward sessions on this node (%d): end some, or raise api.stream_max_sessions: %w",
			t.sum, fault.Exhausted)
	}
	return nil
}

// await waits for target to be allowed another session. The lock is free meanwhile.
func (t *tickets) await(ctx context.Context, target string) {
	ctx, cancel := context.WithTimeout(ctx, placeWait)
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.freed.Broadcast()
	})()
	t.queue++
	defer func() { t.queue-- }()
	for t.full(target) != nil && ctx.Err() == nil {
		t.freed.Wait()
		t.expire()
	}
}

func (t *tickets) count(target string, n int) {
	t.sum += n
	if t.open[target] += n; t.open[target] == 0 {
		delete(t.open, target)
	}
	if n < 0 {
		t.freed.Broadcast()
	}
}

// redeem takes a ticket of one kind of session. The caller must call end when the
// session has ended and its connection is closed.
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
