package panics

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// logged returns what is logged while f runs.
func logged(t *testing.T, f func()) string {
	t.Helper()
	before := slog.Default()
	defer slog.SetDefault(before)
	var text bytes.Buffer
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, nil)))
	f()
	return text.String()
}

func explode() { panic("boom") }

func missing() *holder { return nil }

// A panic becomes an error without details, and is logged with its stack.
func TestPanicBecomesAnError(t *testing.T) {
	for what, work := range map[string]func() error{
		"panic": func() error { explode(); return nil },
		"nil":   func() error { return missing().err },
		"member": func() error {
			var g Group
			defer g.Wait()
			g.Go(explode)
			return nil
		},
	} {
		before := Count()
		var err error
		text := logged(t, func() { err = Do(context.Background(), "make pod", work) })
		if !errors.Is(err, fault.Internal) || err.Error() != "make pod: internal error (panic); stack trace in the log" {
			t.Errorf("%s: %v", what, err)
		}
		if !strings.Contains(text, "level=ERROR") || !strings.Contains(text, `work="make pod"`) || !strings.Contains(text, "panics_test.go") {
			t.Errorf("%s: log %s", what, text)
		}
		if what != "nil" && !strings.Contains(text, "panics.explode") {
			t.Errorf("%s: the stack does not say where: %s", what, text)
		}
		if Count() != before+1 {
			t.Errorf("%s: counted %d", what, Count()-before)
		}
	}
}

type holder struct{ err error }

func TestNothingHappensWithoutAPanic(t *testing.T) {
	before := Count()
	refused := errors.New("refused")
	text := logged(t, func() {
		Run(t.Context(), "work", func() {})
		if err := Do(context.Background(), "work", func() error { return refused }); !errors.Is(err, refused) {
			t.Error(err)
		}
	})
	if text != "" || Count() != before {
		t.Errorf("counted %d, log %q", Count()-before, text)
	}
}

// Wait waits for all goroutines, even after a panic.
func TestGroupWaitsForAll(t *testing.T) {
	var g Group
	var done atomic.Int64
	release := make(chan struct{})
	for i := range 5 {
		g.Go(func() {
			if i == 0 {
				defer close(release)
				panic("boom")
			}
			<-release
			done.Add(1)
		})
	}
	logged(t, func() { Run(t.Context(), "all", g.Wait) })
	if done.Load() != 4 {
		t.Errorf("%d have ended", done.Load())
	}
}

// A watcher gets panics of goroutines too, until it stops.
func TestWatch(t *testing.T) {
	var causes []any
	stop := Watch(func(cause any) { causes = append(causes, cause) })
	Run(t.Context(), "work", explode)
	Run(t.Context(), "member", func() {
		var g Group
		defer g.Wait()
		g.Go(explode)
	})
	stop()
	Run(t.Context(), "later", explode)
	if len(causes) != 2 || causes[0] != "boom" || causes[1] != "boom" {
		t.Errorf("%v", causes)
	}
}
