package pod

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/crius-run/crius/internal/panics"
)

// debts are what could not be finished of an object: its teardown, as a rule, or
// the record of a start. Each is tried again on a course of its own, less often
// while it fails: one that hangs holds up no other. The engine's end ends them;
// the next one finds them on record.
type debts struct {
	slots chan struct{} // for those that are tried at a time

	mu   sync.Mutex
	owed map[string]*debt
}

// debt is one of them. A later one of the same object takes its place, also
// while it is being paid. Nobody pays it twice at a time.
type debt struct {
	pay    func(context.Context) error
	paying chan struct{} // full while it is paid
	tried  chan struct{} // closed when it has been tried once, or is over
	over   chan struct{} // closed when it is paid, or another has come in its place
}

const (
	debtRetryMin = time.Second
	debtRetryMax = time.Minute
	// slotTime is how long a payment counts as work. One that takes longer waits
	// for something, and lets the next one begin.
	slotTime = 5 * time.Second
)

// owe notes that pay has to succeed some day for object id.
func (e *Engine) owe(id string, pay func(context.Context) error) { e.enter(id, pay, debtRetryMin) }

func (e *Engine) enter(id string, pay func(context.Context) error, wait time.Duration) *debt {
	d := &debt{pay: pay, paying: make(chan struct{}, 1), tried: make(chan struct{}), over: make(chan struct{})}
	e.debts.mu.Lock()
	before := e.debts.owed[id]
	e.debts.owed[id] = d
	e.debts.mu.Unlock()
	if before != nil {
		close(before.over)
	}
	e.inBackground("clean up "+id, func() { e.insist("clean up "+id, func() { e.collect(id, d, wait) }) })
	return d
}

// collect tries until the debt is paid.
func (e *Engine) collect(id string, d *debt, wait time.Duration) {
	tried := sync.OnceFunc(func() { close(d.tried) })
	defer tried()
	for {
		retry := time.NewTimer(wait)
		select {
		case <-e.closing:
		case <-d.over:
		case <-retry.C:
		}
		retry.Stop()
		giveBack, ok := e.takeSlot(d)
		if !ok {
			return
		}
		slot := time.AfterFunc(slotTime, giveBack)
		if err := e.payDebt(context.Background(), id, d); err != nil {
			slog.Warn("clean-up still owed", "id", id, "err", err)
		}
		slot.Stop()
		giveBack()
		tried()
		wait = min(max(2*wait, debtRetryMin), debtRetryMax)
	}
}

// takeSlot waits for one; there is none where nothing is to be done any more.
func (e *Engine) takeSlot(d *debt) (giveBack func(), ok bool) {
	select {
	case <-e.closing:
		return nil, false
	case <-d.over:
		return nil, false
	default:
	}
	select {
	case <-e.closing:
		return nil, false
	case <-d.over:
		return nil, false
	case e.debts.slots <- struct{}{}:
		return sync.OnceFunc(func() { <-e.debts.slots }), true
	}
}

// payDebt pays d unless somebody has done so meanwhile. It returns soon after
// undoTime, or the engine's end, even where paying does not.
func (e *Engine) payDebt(ctx context.Context, id string, d *debt) error {
	ctx, cancelUndo := undoContext(ctx)
	defer cancelUndo()
	ctx, cancel := e.untilClosing(ctx)
	defer cancel()
	select {
	case d.paying <- struct{}{}:
	case <-d.over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the attempt before goes on: %w", context.Cause(ctx))
	}
	select {
	case <-d.over: // by whom it had to wait for
		<-d.paying
		return nil
	default:
	}
	paid := make(chan error, 1)
	e.background.Go(func() {
		defer func() { <-d.paying }()
		err := panics.Do(ctx, "clean up", func() error { return e.deps.Trace.Do(ctx, "clean up", id, d.pay) })
		if err == nil {
			slog.InfoContext(ctx, "clean-up done", "id", id)
			e.settle(id, d)
		}
		paid <- err
	})
	select {
	case err := <-paid:
		return err
	case <-ctx.Done():
	}
	const lastWord = time.Second
	select {
	case err := <-paid: // who was called off knows what it was at
		return err
	case <-time.After(lastWord):
		return fmt.Errorf("the attempt goes on: %w", context.Cause(ctx))
	}
}

// settle strikes a debt out, and not another that has come in its place.
func (e *Engine) settle(id string, d *debt) {
	e.debts.mu.Lock()
	defer e.debts.mu.Unlock()
	if e.debts.owed[id] == d {
		delete(e.debts.owed, id)
		close(d.over)
	}
}

func (e *Engine) debtCount() int {
	e.debts.mu.Lock()
	defer e.debts.mu.Unlock()
	return len(e.debts.owed)
}

// owed is a snapshot of the debts.
func (e *Engine) owed() map[string]*debt {
	e.debts.mu.Lock()
	defer e.debts.mu.Unlock()
	return maps.Clone(e.debts.owed)
}

func (e *Engine) owes(id string) bool { return e.owed()[id] != nil }
