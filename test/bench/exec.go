package main

import (
	"context"
	"fmt"
)

// execRuns are how probes run: that many at once, each in its own pod.
var execRuns = []struct{ atOnce, count, rounds int }{{1, 100, 5}, {8, 160, 2}}

// execRow runs a command that does nothing, as exec probes do.
func execRow(ctx context.Context) (tables []table, err error) {
	for _, handler := range handlers {
		t, err := execOf(ctx, handler)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", handler, err)
		}
		tables = append(tables, t...)
	}
	return tables, nil
}

func execOf(ctx context.Context, handler string) (tables []table, err error) {
	c, err := newContest(ctx, handler)
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	const pods = 8
	for _, t := range c.targets {
		if _, err := fill(ctx, t, 0, pods, 4); err != nil {
			return nil, err
		}
	}
	for _, run := range execRuns {
		results := make([]outcome, len(c.targets))
		for range run.rounds {
			for i, t := range c.targets {
				o, err := accounted(ctx, t, run.count/run.rounds, run.atOnce, func(ctx context.Context, n int) (l life, err error) {
					l[execSync], err = t.do(ctx, podName(n%pods), execSync)
					return l, err
				})
				if err != nil {
					return nil, err
				}
				results[i].add(o)
			}
		}
		t := compare(fmt.Sprintf("Exec probes with %s, %d at once, %d each: ms", handler, run.atOnce, run.count), 95, c.names()...)
		var took, cpu [][]float64
		for _, o := range results {
			took, cpu = append(took, o.of(execSync)), append(cpu, []float64{o.each()})
		}
		t.line("ExecSync", took...)
		t.line("CPU each", cpu...)
		tables = append(tables, t.table)
	}
	for _, t := range c.targets {
		if _, err := drain(ctx, t, pods, 4); err != nil {
			return nil, err
		}
	}
	return tables, nil
}
