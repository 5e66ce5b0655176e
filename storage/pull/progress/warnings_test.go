package progress

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

func TestWarningsAreBounded(t *testing.T) {
	t.Parallel()
	var c Counts
	ctx, end := c.Begin(t.Context(), "r.test/app:1")
	defer end()
	if !c.Warn(ctx, "r.test", "w0") || c.Warn(ctx, "r.test", "w0") {
		t.Error("a warning is not shown once")
	}
	for i := 1; i < mostWarnings; i++ {
		if shown := c.Warn(ctx, "r.test", fmt.Sprint("w", i)); shown != (i < shownWarnings) {
			t.Errorf("warning %d is shown: %t", i, shown)
		}
	}
	c.restart(ctx.Value(pullKey{}).(*Pull))
	if got := c.Active()[0].Warnings; !slices.Equal(got, []string{"w0", "w1", "w2", "w3", "w4"}) {
		t.Errorf("the pull shows %q", got)
	}
	if ctx.Err() != nil || c.Warned.Load() != mostWarnings {
		t.Errorf("%v after %d warnings", ctx.Err(), c.Warned.Load())
	}
	c.Warn(ctx, "r.test", "too many")
	if err := CauseOf(ctx, ctx.Err()); !errors.Is(err, fault.Unavailable) || errors.Is(err, context.Canceled) {
		t.Errorf("the pull ends with %v", err)
	}
	for i := range 2 * recentWarnings {
		other, end := c.Begin(t.Context(), fmt.Sprint("r.test/app:", i))
		c.Warn(other, "r.test", "again")
		end()
	}
	if all := c.Warnings(); len(all) != recentWarnings || all[0].Image != fmt.Sprint("r.test/app:", recentWarnings) {
		t.Errorf("%d are kept, from %+v on", len(all), all[0])
	}
	if c.Warn(t.Context(), "r.test", "of no pull") {
		t.Error("a warning of no pull is shown")
	}
}
