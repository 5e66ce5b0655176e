package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
)

// phases are the parts of a pod's life, each timed by itself.
var phases = [...]string{
	"RunPodSandbox", "CreateContainer", "StartContainer", "pod up (all three)",
	"ExecSync", "stop and remove container", "stop and remove pod",
}

const (
	runPodSandbox = iota
	createContainer
	startContainer
	podUp
	execSync
	containerDown
	podDown
)

// life is how many seconds each phase of a pod's life took.
type life [len(phases)]float64

// A target lets pods live: a server of CRI, or the commands below all of them.
type target interface {
	name() string
	// live runs a pod with a container, runs a command in it and removes both.
	live(ctx context.Context, name string) (life, error)
	// cpu is how many seconds everything of the target has used until now.
	cpu() (float64, error)
}

// podsRuns are how the pods of a run live: sets of atOnce, as many rounds as
// make count.
var podsRuns = []struct{ atOnce, count, rounds int }{{1, 30, 6}, {8, 48, 3}}

// podsRow lets pods live on the floor, that is by the commands that nobody can
// avoid, on crius and on containerd, in turn.
func podsRow(ctx context.Context) (tables []table, err error) {
	for _, handler := range []string{"runc", "crun"} {
		more, err := podsOf(ctx, handler)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", handler, err)
		}
		tables = append(tables, more...)
	}
	return tables, nil
}

func podsOf(ctx context.Context, handler string) (tables []table, err error) {
	ours, err := newCrius(ctx, handler)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, ours.close()) }()
	theirs, err := newContainerd(ctx, handler)
	if err != nil {
		return nil, fmt.Errorf("containerd: %w", err)
	}
	defer func() { err = errors.Join(err, theirs.close()) }()
	ground, err := newFloor(ctx, ours, handler)
	if err != nil {
		return nil, fmt.Errorf("floor: %w", err)
	}
	defer func() { err = errors.Join(err, ground.close()) }()

	targets := []target{ground, ours, theirs}
	for _, t := range targets { // what is made at first use is not measured
		if _, err := t.live(ctx, handler+"-first"); err != nil {
			return nil, fmt.Errorf("%s: %w", t.name(), err)
		}
	}
	for _, run := range podsRuns {
		results, err := takeTurns(ctx, targets, run.rounds, run.count/run.rounds, run.atOnce)
		if err != nil {
			return nil, err
		}
		title := fmt.Sprintf("Pods with %s, %d at once, %d each", handler, run.atOnce, run.count)
		tables = append(tables, podsTable(title, targets, results))
	}
	return tables, nil
}

// outcome is what a target made of its rounds.
type outcome struct {
	lives     []life
	cpu, wall float64 // seconds
}

// takeTurns gives each target the same work in each round.
func takeTurns(ctx context.Context, targets []target, rounds, perRound, atOnce int) ([]outcome, error) {
	results := make([]outcome, len(targets))
	for round := range rounds {
		for i, t := range targets {
			one, err := takeTurn(ctx, t, fmt.Sprintf("%d-%d", atOnce, round), perRound, atOnce)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", t.name(), err)
			}
			r := &results[i]
			r.lives, r.cpu, r.wall = append(r.lives, one.lives...), r.cpu+one.cpu, r.wall+one.wall
		}
	}
	return results, nil
}

func takeTurn(ctx context.Context, t target, prefix string, count, atOnce int) (outcome, error) {
	o := outcome{lives: make([]life, count)}
	before, err := t.cpu()
	if err != nil {
		return o, err
	}
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i := range count {
		group.Go(func() (err error) {
			o.lives[i], err = t.live(ctx, fmt.Sprintf("%s-%d", prefix, i))
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return o, err
	}
	o.wall = time.Since(began).Seconds()
	after, err := t.cpu()
	o.cpu = after - before
	return o, err
}

// podsTable compares the second target with the first and the third.
func podsTable(title string, targets []target, results []outcome) table {
	t := table{title: title + ": ms", head: []string{""}}
	for _, target := range targets {
		t.head = append(t.head, target.name(), "p95")
	}
	t.head = append(t.head, "crius/floor", "crius/containerd")
	line := func(name string, of func(outcome) (value, p95 float64)) {
		cells, values := []string{name}, make([]float64, len(results))
		for i, r := range results {
			value, p95 := of(r)
			values[i] = value
			cells = append(cells, fmt.Sprintf("%.1f", value))
			if p95 > 0 {
				cells = append(cells, fmt.Sprintf("%.1f", p95))
			} else {
				cells = append(cells, "")
			}
		}
		t.add(append(cells, fmt.Sprintf("%.2f", values[1]/values[0]), fmt.Sprintf("%.2f", values[1]/values[2]))...)
	}
	for i, phase := range phases {
		line(phase, func(o outcome) (float64, float64) {
			took := make([]float64, len(o.lives))
			for j, l := range o.lives {
				took[j] = l[i] * 1e3
			}
			return median(took), percentile(took, 95)
		})
	}
	line("CPU per life", func(o outcome) (float64, float64) { return o.cpu * 1e3 / float64(len(o.lives)), 0 })
	line("lives per second", func(o outcome) (float64, float64) { return float64(len(o.lives)) / o.wall, 0 })
	return t
}
