package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// stepsLives is the number of pods, one at a time, over which the steps are
// averaged.
const stepsLives = 60

// stepsRow shows where the time of a pod's life is spent, by crius's own
// metrics: the calls, and their steps.
func stepsRow(ctx context.Context) (tables []table, err error) {
	for _, handler := range []string{"runc", "crun"} {
		t, err := stepsOf(ctx, handler)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", handler, err)
		}
		tables = append(tables, t)
	}
	return tables, nil
}

func stepsOf(ctx context.Context, handler string) (_ table, err error) {
	s, err := newCrius(ctx, handler)
	if err != nil {
		return table{}, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if _, err := live(ctx, s, "first"); err != nil {
		return table{}, err
	}
	before, err := s.spent(ctx)
	if err != nil {
		return table{}, err
	}
	for i := range stepsLives {
		if _, err := live(ctx, s, podName(i)); err != nil {
			return table{}, err
		}
	}
	after, err := s.spent(ctx)
	if err != nil {
		return table{}, err
	}
	t := table{
		title: fmt.Sprintf("Where a pod's time goes with %s, mean of %d lives: calls and their steps", handler, stepsLives),
		head:  []string{"", "times", "ms each", "ms in all"},
	}
	for name, spent := range after {
		spent.seconds -= before[name].seconds
		spent.count -= before[name].count
		after[name] = spent
	}
	names := slices.SortedFunc(maps.Keys(after), func(a, b string) int {
		if a[0] != b[0] { // calls before steps
			return strings.Compare(a, b)
		}
		return int(1e6 * (after[b].seconds - after[a].seconds))
	})
	for _, name := range names {
		if spent := after[name]; spent.count > 0 {
			t.add(name, fmt.Sprintf("%.1f", spent.count/stepsLives),
				fmt.Sprintf("%.2f", spent.seconds*1e3/spent.count), fmt.Sprintf("%.2f", spent.seconds*1e3/stepsLives))
		}
	}
	return t, nil
}

// spent is one series of a histogram.
type spent struct{ count, seconds float64 }

// spent reads the histograms of calls and steps, by "call NAME" and "step NAME".
func (s *server) spent(ctx context.Context) (map[string]spent, error) {
	text, err := s.metrics(ctx)
	if err != nil {
		return nil, err
	}
	all := map[string]spent{}
	for line := range strings.Lines(text) {
		for prefix, kind := range map[string]string{
			"crius_rpc_duration_seconds_": "call ", "crius_step_duration_seconds_": "step ",
		} {
			what, rest, _ := strings.Cut(strings.TrimPrefix(line, prefix), "{")
			words := strings.Split(rest, `"`) // label= name } value
			if !strings.HasPrefix(line, prefix) || len(words) != 3 {
				continue
			}
			value, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimPrefix(words[2], "}")), 64)
			if err != nil {
				return nil, fmt.Errorf("%q: %w", line, err)
			}
			name := kind + strings.TrimPrefix(words[1], "/runtime.v1.RuntimeService/")
			one := all[name]
			switch what {
			case "count":
				one.count = value
			case "sum":
				one.seconds = value
			}
			all[name] = one
		}
	}
	return all, nil
}
