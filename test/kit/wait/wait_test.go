package wait

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

func TestUntilLooksAgainUntilTrue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		if !Until(t.Context(), func() bool { looks++; return looks == 1000 }) {
			t.Fatal("gave up")
		}
	})
}

func TestUntilGivesUpAtTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if Until(t.Context(), func() bool { return false }) {
			t.Fatal("reported true for a condition that never is")
		}
		if passed := time.Since(began); passed != Limit { // of synctest's clock
			t.Errorf("gave up after %v", passed)
		}
	})
}

func TestUntilEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	looks := 0
	if Until(ctx, func() bool { looks++; return looks == 3 }) || looks != 2 {
		t.Errorf("looked %d times with an ended context, want 2", looks)
	}
}

// fatal records what For reports.
type fatal struct {
	*testing.T
	text string
}

func (f *fatal) Fatalf(format string, args ...any) { f.text = fmt.Sprintf(format, args...) }

func TestForNamesTheCondition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fatal{T: t}
		For(f, "the impossible", func() bool { return false })
		if want := fmt.Sprintf("waited %v for the impossible", Limit); f.text != want {
			t.Errorf("failed with %q, want %q", f.text, want)
		}
	})
}

func TestRetryEndsWithTheFirstSuccess(t *testing.T) {
	tries := 0
	Retry(t, func() error {
		if tries++; tries < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if tries != 3 {
		t.Errorf("%d tries", tries)
	}
}

func TestRetryGivesUp(t *testing.T) {
	f, tries := &fatal{T: t}, 0
	Retry(f, func() error { tries++; return fmt.Errorf("try %d", tries) })
	if want := "5 tries failed:\ntry 1\ntry 2\ntry 3\ntry 4\ntry 5"; f.text != want {
		t.Errorf("failed with %q, want %q", f.text, want)
	}
}
