package poll

import (
	"context"
	"testing"
	"time"
)

func TestUntilAsksUntilItIsTrue(t *testing.T) {
	asked := 0
	done := func() bool { asked++; return asked == 3 }
	if !Until(t.Context(), time.Millisecond, done) || asked != 3 {
		t.Errorf("asked %d times, want 3", asked)
	}
}

func TestUntilAsksOnceUnderAContextThatIsOver(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	asked := 0
	if Until(ctx, time.Hour, func() bool { asked++; return false }) || asked != 1 {
		t.Errorf("asked %d times, want once", asked)
	}
	if !Until(ctx, time.Hour, func() bool { return true }) {
		t.Error("what is true is not reported")
	}
}

func TestUntilAsksOnceMoreAtTheEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	asked := 0
	done := func() bool { asked++; cancel(); return asked == 2 }
	if !Until(ctx, time.Hour, done) || asked != 2 {
		t.Errorf("asked %d times, want twice", asked)
	}
}

func TestPauseEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if Pause(ctx, time.Hour) {
		t.Error("reported an hour that has not passed")
	}
	if !Pause(t.Context(), time.Millisecond) {
		t.Error("reported that the context ended")
	}
}
