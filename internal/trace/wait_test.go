package trace

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crius-run/crius/internal/fault"
)

// logged returns what run logs at warning. The test is not parallel: the default logger is shared.
func logged(t *testing.T, run func(t *testing.T)) string {
	t.Helper()
	var out bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn})))
	defer slog.SetDefault(before)
	synctest.Test(t, run)
	return out.String()
}

func TestSlowStepsAreReportedOnce(t *testing.T) {
	lasting := func(d time.Duration) func(context.Context) error {
		return func(context.Context) error { time.Sleep(d); return nil }
	}
	for name, c := range map[string]struct {
		run  func(ctx context.Context) error
		want string // in the only warning; empty: there is none
	}{
		"quick": {func(ctx context.Context) error { return Do(ctx, "mount", lasting(29*time.Second)) }, ""},
		"slow":  {func(ctx context.Context) error { return Do(ctx, "mount", lasting(time.Hour)) }, "step=mount"},
		"slow within another": {func(ctx context.Context) error {
			return Do(ctx, "outer", func(ctx context.Context) error { return Do(ctx, "inner", lasting(time.Hour)) })
		}, "step=inner"},
		"slow for whom": {func(ctx context.Context) error {
			return Do(ctx, "CNI ADD", func(ctx context.Context) error {
				ctx, cancel := context.WithTimeout(ctx, 2*time.Hour)
				defer cancel()
				defer For(ctx, "CNI plugin bridge")()
				time.Sleep(time.Hour)
				return nil
			})
		}, `step="CNI ADD" waits_for="CNI plugin bridge" until=`},
		"a wait": {func(ctx context.Context) error {
			return Wait(ctx, Waiting{Name: "registry asks to wait", For: "registry.example"}, lasting(time.Minute))
		}, "waits_for=registry.example"},
		"may last": {func(ctx context.Context) error { return Long(ctx, "copy image", lasting(time.Hour)) }, ""},
		"a wait in what may last": {func(ctx context.Context) error {
			return Long(ctx, "copy image", func(ctx context.Context) error {
				return Wait(ctx, Waiting{Name: "wait for a lock"}, lasting(time.Hour))
			})
		}, "wait for a lock"},
	} {
		t.Run(name, func(t *testing.T) {
			got := logged(t, func(t *testing.T) {
				tracer := New()
				tracer.SetNames(func(string) string { return "shop/cart" })
				_ = tracer.Do(t.Context(), "run pod", "0123", c.run)
			})
			lines := strings.Count(got, "\n")
			if c.want == "" && lines > 0 || c.want != "" && (lines != 1 || !strings.Contains(got, c.want) || !strings.Contains(got, "object_name=shop/cart")) {
				t.Errorf("logged %q, want one line with %q", got, c.want)
			}
		})
	}
}

func TestLimitsOfOperationsAreReported(t *testing.T) {
	limit := func(ctx context.Context) error {
		return Do(ctx, "CNI ADD", func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			defer For(ctx, "CNI plugin bridge")()
			<-ctx.Done()
			return fmt.Errorf("killed: %w", fault.Timeout)
		})
	}
	for name, c := range map[string]struct {
		wrap func(context.Context) context.Context
		run  func(context.Context) error
		want bool
	}{
		"own limit":         {context.WithoutCancel, limit, true},
		"limit of a caller": {CallersLimit, limit, false},
		"another error":     {context.WithoutCancel, func(context.Context) error { return fault.Invalid }, false},
	} {
		t.Run(name, func(t *testing.T) {
			got := logged(t, func(t *testing.T) { _ = New().Do(c.wrap(t.Context()), "run pod", "a", c.run) })
			if strings.Contains(got, `step="CNI ADD" waits_for="CNI plugin bridge"`) != c.want {
				t.Errorf("logged %q", got)
			}
		})
	}
}

func TestWaitsAreSeen(t *testing.T) {
	tracer := New()
	until := time.Now().Add(time.Hour)
	_ = tracer.Do(t.Context(), "pull image", "busybox", func(ctx context.Context) error {
		return Wait(ctx, Waiting{Name: "registry asks to wait", For: "registry.example", Until: until}, func(context.Context) error {
			w := tracer.Active()[0]
			if w.Step != "registry asks to wait" || w.WaitsFor != "registry.example" || !w.Until.Equal(until) {
				t.Errorf("in progress: %+v", w)
			}
			return nil
		})
	})
}
