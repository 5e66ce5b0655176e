package stream

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/server/trail"
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
	mostEach int // sessions that a container or pod may have; 0: any number

	mu      sync.Mutex
	freed   sync.Cond // a session has ended, or its client has connected
	waiting map[string]ticket
	queue   *shares // callers that wait for one of these
	pending *shares // tickets that wait for their client
	open    *shares // sessions, waiting and begun
	refused *refusals
}

// newTickets is for most sessions, and mostEach of a container or pod; 0: any number.
func newTickets(most, mostEach int) *tickets {
	t := &tickets{
		mostEach: mostEach, waiting: make(map[string]ticket),
		queue: newShares(maxQueue), pending: newShares(maxTickets), open: newShares(most),
		refused: newRefusals(),
	}
	t.freed.L = &t.mu
	return t
}

// bound replaces the numbers of newTickets.
func (t *tickets) bound(most, mostEach int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open.most, t.mostEach = most, mostEach
	t.freed.Broadcast()
}

// ticket admits one client to one session.
type ticket struct {
	party   party
	session any // an ExecRequest, an AttachRequest or a PortForwardRequest
	entry   *trail.Entry
	expires time.Time
}

// issue keeps session until it is redeemed, and returns the token for it. Where there
// are too many sessions it waits for one to end, up to placeWait or the end of ctx.
func (t *tickets) issue(ctx context.Context, p party, session any, entry *trail.Entry) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire()
	if reason, _ := t.full(p); reason != "" && t.queue.admits(p) {
		t.await(ctx, p)
	}
	if reason, err := t.full(p); err != nil {
		t.refused.add(reason, p, err)
		return "", err
	}
	token := rand.Text()
	t.waiting[token] = ticket{p, session, entry, time.Now().Add(ticketLife)}
	t.pending.count(p, 1)
	t.open.count(p, 1)
	return token, nil
}

// expire forgets tickets for which nobody has come.
func (t *tickets) expire() {
	now := time.Now()
	for token, waiting := range t.waiting {
		if now.After(waiting.expires) {
			t.drop(token, waiting.party)
			t.end(waiting.party)
		}
	}
}

// drop makes a ticket one that waits no more.
func (t *tickets) drop(token string, p party) {
	delete(t.waiting, token)
	t.pending.count(p, -1)
	t.freed.Broadcast()
}

func (t *tickets) end(p party) {
	t.open.count(p, -1)
	t.freed.Broadcast()
}

// full says why p may not have another session: for people, and for metrics.
func (t *tickets) full(p party) (reason string, err error) {
	switch open := t.open; {
	case t.mostEach > 0 && open.targets[p.target] >= t.mostEach:
		return refusedContainer, fmt.Errorf("too many sessions (%d) of %s: end some, or raise api.stream_max_sessions_per_container: %w",
			open.targets[p.target], p.target, fault.Exhausted)
	case !open.admits(p):
		return refusedNode, fmt.Errorf("too many exec, attach and port-forward sessions on this node (%d, of which namespace %q has %d and %s has %d; some of api.stream_max_sessions = %d are kept for others): end some, or raise api.stream_max_sessions: %w",
			open.sum, p.namespace, open.namespaces[p.namespace], p.target, open.targets[p.target], open.most, fault.Exhausted)
	case !t.pending.admits(p):
		return refusedPending, fmt.Errorf("too many sessions that no client has connected to (%d, of which namespace %q has %d): %w",
			t.pending.sum, p.namespace, t.pending.namespaces[p.namespace], fault.Exhausted)
	}
	return "", nil
}

// await waits for p to be allowed another session. The lock is free meanwhile.
func (t *tickets) await(ctx context.Context, p party) {
	ctx, cancel := context.WithTimeout(ctx, placeWait)
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.freed.Broadcast()
	})()
	t.queue.count(p, 1)
	defer func() { t.queue.count(p, -1) }()
	for ctx.Err() == nil {
		if reason, _ := t.full(p); reason == "" {
			return
		}
		t.freed.Wait()
		t.expire()
	}
}

// redeem takes a ticket of one kind of session, with its entry in the audit trail. The caller must call end when the
// session has ended and its connection is closed.
func redeem[T any](t *tickets, token string) (session T, entry *trail.Entry, end func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting, ok := t.waiting[token]
	if !ok {
		return session, nil, nil, false
	}
	if session, ok = waiting.session.(T); !ok {
		return session, nil, nil, false
	}
	t.drop(token, waiting.party)
	if !time.Now().Before(waiting.expires) {
		t.end(waiting.party)
		return session, nil, nil, false
	}
	return session, waiting.entry, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.end(waiting.party)
	}, true
}
