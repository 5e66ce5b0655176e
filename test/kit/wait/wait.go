// Package wait polls for a condition, in the same way in every test.
//
// A test asserts what happens, not how long it takes. So there is one limit,
// long enough for a machine a quarter as fast as a developer's and busy
// besides; only a failing test reaches it.
//
// The package depends on no testing package: test programs use it too.
package wait

import (
	"context"
	"errors"
	"time"
)

// Limit is how long a condition may take to become true.
const Limit = 5 * time.Minute

// interval is the longest pause between two looks. The first pauses are
// shorter: most conditions are true within a millisecond or two.
const interval = 20 * time.Millisecond

// TB is the part of testing.TB that [For] needs.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
}

// For waits until cond is true and ends the test if it never becomes true. what
// names the condition in the failure: "the container to exit". Call it only on
// the test's own goroutine; a cleanup is fine too, although the test's context
// has ended there.
func For(t TB, what string, cond func() bool) {
	t.Helper()
	if !Until(context.Background(), cond) {
		t.Fatalf("waited %v for %s", Limit, what)
	}
}

// Retry is for what a correct program does only if the machine does not pause
// for seconds meanwhile, because one of the program's own time limits would
// expire. It calls do until that returns nil, and ends the test with the errors
// after five failed tries.
func Retry(t TB, do func() error) {
	t.Helper()
	const tries = 5
	var errs []error
	for range tries {
		err := do()
		if err == nil {
			return
		}
		errs = append(errs, err)
	}
	t.Fatalf("%d tries failed:\n%v", tries, errors.Join(errs...))
}

// Until waits until cond is true and reports whether it became true before
// Limit and the end of ctx. It checks once more after either, so that a caller
// that was not scheduled for a while still sees what has happened meanwhile.
func Until(ctx context.Context, cond func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, Limit)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, interval) {
		if cond() {
			return true
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		if ctx.Err() != nil {
			return cond()
		}
	}
}
