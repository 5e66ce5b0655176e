package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/crius-run/crius/test/kit/inventory"
)

const (
	// nodePods is about a kubelet's own limit for a node.
	nodePods = 100
	// nodeAtOnce is how many of them come and go at once.
	nodeAtOnce = 8
	// nodeRounds is how often each node is filled and emptied for its speed.
	nodeRounds = 3
	// idleTime is how long a node is left idle for measuring its usage.
	idleTime = 10 * time.Second
	// restTime is how long its CPU is measured: what an idle server takes in ten seconds differs by a factor of three,
	// and Go collects garbage every two minutes in any case.
	restTime = 2 * time.Minute
	// silentTime is how long the containers have been silent then: crius's
	// monitors rest after ten seconds.
	silentTime = 75 * time.Second
)

// nodeRow measures nodes full of pods, and then fills and empties them in turn.
func nodeRow(ctx context.Context) (tables []table, err error) {
	const handler = "runc"
	pods, err := amount("PODS", nodePods)
	if err != nil {
		return nil, err
	}
	c, us, them, err := newServers(ctx, handler)
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	var idle []burden
	for _, s := range []*server{us, them} {
		b, err := burdenOf(ctx, s, pods)
		if err != nil {
			return nil, err
		}
		idle = append(idle, b)
	}
	weights := idleTable(c.names(), pods, idle)
	if err := c.bare(ctx); err != nil {
		return nil, err
	}
	if err := c.addFloor(ctx, us); err != nil { // only now, because its pod would count, too
		return nil, err
	}
	speed, err := speedOf(ctx, c.targets, pods)
	if err != nil {
		return nil, err
	}
	t := compare(fmt.Sprintf("%d pods with %s, %d at once", pods, handler, nodeAtOnce), 0, c.names()...)
	t.line("up: pods per second", measured(speed, func(s speeds) outcome { return s.up }, outcome.rate)...)
	t.line("down: pods per second", measured(speed, func(s speeds) outcome { return s.down }, outcome.rate)...)
	t.line("up: CPU ms a pod", measured(speed, func(s speeds) outcome { return s.up }, outcome.each)...)
	t.line("down: CPU ms a pod", measured(speed, func(s speeds) outcome { return s.down }, outcome.each)...)
	return []table{t.table, weights}, nil
}

// speeds are the speeds of filling and emptying a node.
type speeds struct{ up, down outcome }

// speedOf fills and empties nodes in turn, some rounds.
func speedOf(ctx context.Context, targets []target, pods int) (all [][]speeds, err error) {
	all = make([][]speeds, len(targets))
	for range nodeRounds {
		for i, t := range targets {
			var s speeds
			if s.up, err = fill(ctx, t, 0, pods, nodeAtOnce); err != nil {
				return nil, err
			}
			if s.down, err = drain(ctx, t, pods, nodeAtOnce); err != nil {
				return nil, err
			}
			all[i] = append(all[i], s)
		}
	}
	return all, nil
}

// measured returns one figure of each round, for each target.
func measured(all [][]speeds, part func(speeds) outcome, figure func(outcome) float64) [][]float64 {
	samples := make([][]float64, len(all))
	for i, rounds := range all {
		for _, s := range rounds {
			samples[i] = append(samples[i], figure(part(s)))
		}
	}
	return samples
}

// burden is the usage of a node without pods, and with them.
type burden struct{ empty, full, silent weight }

func burdenOf(ctx context.Context, s *server, pods int) (b burden, err error) {
	if b.empty, err = weigh(ctx, s, restTime); err != nil {
		return b, err
	}
	if _, err = fill(ctx, s, 0, pods, nodeAtOnce); err != nil {
		return b, err
	}
	if b.full, err = weigh(ctx, s, idleTime); err != nil {
		return b, err
	}
	if err = pause(ctx, silentTime-idleTime); err != nil {
		return b, err
	}
	if b.silent, err = weigh(ctx, s, restTime); err != nil {
		return b, err
	}
	_, err = drain(ctx, s, pods, nodeAtOnce)
	return b, err
}

// podName returns the name of a pod with that number.
func podName(i int) string { return fmt.Sprintf("pod-%d", i) }

// fill runs the pods from one number up to another, and checks the last.
func fill(ctx context.Context, t target, from, to, atOnce int) (outcome, error) {
	o, err := accounted(ctx, t, to-from, atOnce, func(ctx context.Context, i int) (life, error) { return up(ctx, t, podName(from+i)) })
	if err != nil {
		return o, err
	}
	if err := t.prove(ctx, podName(to-1)); err != nil {
		return o, fmt.Errorf("%s: %w", t.name(), err)
	}
	return o, nil
}

// drain removes that many of them.
func drain(ctx context.Context, t target, count, atOnce int) (outcome, error) {
	return accounted(ctx, t, count, atOnce, func(ctx context.Context, i int) (life, error) { return down(ctx, t, podName(i)) })
}

// weight is memory in KiB (Pss), and CPU in ms per second.
type weight struct {
	server, helpers, pauses float64
	cpu                     float64 // of all together
}

func (w weight) memory() float64 { return w.server + w.helpers + w.pauses }

// weigh measures CPU over a time, and then memory. It leaves out the containers themselves, which are the same everywhere.
func weigh(ctx context.Context, s *server, over time.Duration) (w weight, err error) {
	before, err := s.cpu()
	if err != nil {
		return w, err
	}
	if err := pause(ctx, over); err != nil {
		return w, err
	}
	after, err := s.cpu()
	if err != nil {
		return w, err
	}
	w.cpu = (after - before) * 1e3 / over.Seconds()
	workload := strings.Join(append([]string{"/probe"}, s.args...), "\x00") + "\x00"
	for _, pid := range inventory.Processes(inventory.Scope{Dir: s.on.Dir, Cgroup: "/" + s.on.ID, Ignore: []int{os.Getpid()}}) {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			return w, err
		}
		if string(line) == workload {
			continue
		}
		kib, err := pss(pid)
		if err != nil {
			return w, err
		}
		program, _, _ := strings.Cut(string(line), "\x00")
		switch program = filepath.Base(program); {
		case pid == s.program.PID():
			w.server = kib
		case program == "pause":
			w.pauses += kib
		case slices.Contains([]string{"crius-conmon", "containerd-shim-runc-v2"}, program):
			w.helpers += kib
		default:
			return w, fmt.Errorf("%s has a process that nobody expects: %q", s.label, line)
		}
	}
	return w, nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func idleTable(names []string, pods int, all []burden) table {
	t := compare("Idle nodes: memory (Pss) and CPU; the containers are not in it", 0, names...)
	line := func(name string, of func(b burden) float64) {
		var samples [][]float64
		for _, b := range all {
			samples = append(samples, []float64{of(b)})
		}
		t.line(name, samples...)
	}
	line("server MiB without pods", func(b burden) float64 { return b.empty.server / 1024 })
	line(fmt.Sprintf("server MiB with %d pods", pods), func(b burden) float64 { return b.full.server / 1024 })
	line("KiB a pod: monitor or shim", func(b burden) float64 { return b.full.helpers / float64(pods) })
	line("KiB a pod: the same, silent for a minute", func(b burden) float64 { return b.silent.helpers / float64(pods) })
	line("KiB a pod: pause", func(b burden) float64 { return b.full.pauses / float64(pods) })
	line("MiB in all", func(b burden) float64 { return b.full.memory() / 1024 })
	line("MiB in all, silent for a minute", func(b burden) float64 { return b.silent.memory() / 1024 })
	line("CPU ms a second without pods", func(b burden) float64 { return b.empty.cpu })
	line(fmt.Sprintf("CPU ms a second with %d pods, just up", pods), func(b burden) float64 { return b.full.cpu })
	line(fmt.Sprintf("CPU ms a second with %d pods, silent for a minute", pods), func(b burden) float64 { return b.silent.cpu })
	return t.table
}
