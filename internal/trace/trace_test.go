package trace

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
)

// diary writes down what it observes.
type diary struct{ lines []string }

type depth struct{}

func (d *diary) Begin(ctx context.Context, kind Kind, name, object string) (context.Context, func(error)) {
	n, _ := ctx.Value(depth{}).(int)
	if min(n, 2) != int(kind) {
		d.lines = append(d.lines, "not of its kind: "+name)
	}
	if (object != "") != (kind == Operation) {
		d.lines = append(d.lines, "not of its object: "+name)
	}
	d.lines = append(d.lines, strings.Repeat(" ", n)+name)
	return context.WithValue(ctx, depth{}, n+1), func(err error) {
		line := strings.Repeat(" ", n) + "end of " + name
		if err != nil {
			line += ": " + err.Error()
		}
		d.lines = append(d.lines, line)
	}
}

var errBroken = errors.New("broken")

func TestOperation(t *testing.T) {
	d := &diary{}
	tracer := New(d)
	run := func(ctx context.Context) error {
		if err := Do(ctx, "first", func(context.Context) error { return nil }); err != nil {
			return err
		}
		return Do(ctx, "second", func(ctx context.Context) error {
			return Do(ctx, "inner", func(context.Context) error {
				active := tracer.Active()
				if len(active) != 1 || active[0].Operation != "run" || active[0].Object != "a" || active[0].Step != "inner" || active[0].Took < active[0].StepTook {
					t.Errorf("active: %+v", active)
				}
				return errBroken
			})
		})
	}
	err := tracer.Call(t.Context(), "Run", func(ctx context.Context) error { return tracer.Do(ctx, "run", "a", run) })
	if !errors.Is(err, errBroken) {
		t.Errorf("got %v", err)
	}
	want := []string{
		"Run", " run", "  first", "  end of first", "  second", "   inner", "   end of inner: broken",
		"  end of second: broken", " end of run: broken", "end of Run: broken",
	}
	if !slices.Equal(d.lines, want) {
		t.Errorf("observed %q", d.lines)
	}
	if active := tracer.Active(); len(active) != 0 {
		t.Errorf("still active: %+v", active)
	}
}

func TestActiveOrder(t *testing.T) {
	tracer := &Tracer{}
	_ = tracer.Do(t.Context(), "old", "a", func(ctx context.Context) error {
		return tracer.Do(ctx, "new", "b", func(context.Context) error {
			if active := tracer.Active(); len(active) != 2 || active[0].Operation != "old" || active[1].Step != "" {
				t.Errorf("active: %+v", active)
			}
			return nil
		})
	})
}

func TestLeave(t *testing.T) {
	tracer := &Tracer{}
	_ = tracer.Do(t.Context(), "exec", "a", func(ctx context.Context) error {
		Leave(ctx)
		if active := tracer.Active(); len(active) != 0 {
			t.Errorf("active: %+v", active)
		}
		return Do(ctx, "step", func(context.Context) error { return nil })
	})
	Leave(t.Context()) // of no operation
}

// Without a tracer the work is done nevertheless.
func TestNoTracer(t *testing.T) {
	var tracer *Tracer
	err := tracer.Call(t.Context(), "Run", func(ctx context.Context) error {
		return tracer.Do(ctx, "run", "a", func(ctx context.Context) error {
			return Do(ctx, "step", func(context.Context) error { return errBroken })
		})
	})
	if !errors.Is(err, errBroken) || tracer.Active() != nil {
		t.Errorf("got %v", err)
	}
}

// A hook is called on both edges of a step; its error is the step's.
func TestHook(t *testing.T) {
	errHook := errors.New("hook")
	for _, c := range []struct {
		name     string
		at       *bool // where the hook fails
		ran      bool
		step     error
		is       []error
		numCalls int
	}{
		{"silent", nil, true, nil, nil, 2},
		{"before", new(false), false, errBroken, []error{errHook}, 1},
		{"after", new(true), true, nil, []error{errHook}, 2},
		{"after a failure", new(true), true, errBroken, []error{errBroken, errHook}, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			var calls []Point
			tracer := New()
			tracer.Hook = func(p Point) error {
				calls = append(calls, p)
				if c.at != nil && p.After == *c.at {
					return errHook
				}
				return nil
			}
			ran := false
			err := tracer.Do(t.Context(), "run", "a", func(ctx context.Context) error {
				return Call(ctx, "step", func() error { ran = true; return c.step })
			})
			if ran != c.ran || (err == nil) != (c.is == nil) {
				t.Errorf("ran: %v, error: %v", ran, err)
			}
			for _, want := range c.is {
				if !errors.Is(err, want) {
					t.Errorf("error %v is not %v", err, want)
				}
			}
			want := []Point{{"run", "a", "step", false}, {"run", "a", "step", true}}[:c.numCalls]
			if !slices.Equal(calls, want) {
				t.Errorf("called at %v", calls)
			}
		})
	}
}

// Get returns the result even if the step has failed.
func TestGet(t *testing.T) {
	n, err := Get(t.Context(), "step", func(context.Context) (int, error) { return 3, errBroken })
	if n != 3 || !errors.Is(err, errBroken) {
		t.Errorf("got %d, %v", n, err)
	}
}

func BenchmarkStep(b *testing.B) {
	tracer := New()
	b.ReportAllocs()
	_ = tracer.Do(b.Context(), "run", "a", func(ctx context.Context) error {
		for b.Loop() {
			_ = Do(ctx, "step", func(context.Context) error { return nil })
		}
		return nil
	})
}
