package main

import (
	"context"
	"fmt"
)

// podsRuns are how the pods of a run live: in sets of atOnce, in as many rounds
// as make count.
var podsRuns = []struct{ atOnce, count, rounds int }{{1, 30, 6}, {8, 48, 3}}

// handlers are the runtimes with which pods are measured.
var handlers = []string{"runc", "crun"}

// podsRow runs pods on the floor, that is with only the unavoidable commands,
// on crius and on containerd, in turn.
func podsRow(ctx context.Context) (tables []table, err error) {
	for _, handler := range handlers {
		more, err := podsOf(ctx, handler)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", handler, err)
		}
		tables = append(tables, more...)
	}
	return tables, nil
}

func podsOf(ctx context.Context, handler string) (tables []table, err error) {
	c, err := newContest(ctx, handler)
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	return c.lives(ctx, handler)
}

// lives has each target run the pods of podsRuns in turn.
func (c *contest) lives(ctx context.Context, handler string) (tables []table, err error) {
	for _, run := range podsRuns {
		results := make([]outcome, len(c.targets))
		for round := range run.rounds {
			for i, t := range c.targets {
				o, err := accounted(ctx, t, run.count/run.rounds, run.atOnce, func(ctx context.Context, n int) (life, error) {
					return live(ctx, t, fmt.Sprintf("%d-%d-%d", run.atOnce, round, n))
				})
				if err != nil {
					return nil, err
				}
				results[i].add(o)
			}
		}
		title := fmt.Sprintf("Pods with %s, %d at once, %d each: ms", handler, run.atOnce, run.count)
		tables = append(tables, livesTable(title, c.names(), results))
	}
	return tables, nil
}

// livesTable compares complete lives, phase by phase.
func livesTable(title string, names []string, results []outcome) table {
	t := compare(title, 95, names...)
	line := func(name string, of func(o outcome) []float64) {
		samples := make([][]float64, len(results))
		for i, o := range results {
			samples[i] = of(o)
		}
		t.line(name, samples...)
	}
	for phase, name := range phases {
		line(name, func(o outcome) []float64 { return o.of(phase) })
	}
	if results[0].cpu > 0 {
		line("CPU per life", func(o outcome) []float64 { return []float64{o.each()} })
	}
	line("lives per second", func(o outcome) []float64 { return []float64{o.rate()} })
	return t.table
}
