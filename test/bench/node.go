package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/crius-run/crius/internal/testkit/inventory"
)

const (
	// nodePods are as many as a node has by a kubelet's own limit, or nearly.
	nodePods = 100
	// nodeAtOnce is how many of them come and go at once.
	nodeAtOnce = 8
	// idleTime is how long a node is left alone to see what it uses.
	idleTime = 10 * time.Second
)

// nodeRow fills nodes with pods, weighs them, and empties them.
func nodeRow(ctx context.Context) (tables []table, err error) {
	const handler = "runc"
	c, err := newContest(ctx, handler)
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	var ups, downs [][]float64
	var empty, full []weight
	for _, t := range c.targets {
		s, serves := t.(*server)
		if serves {
			w, err := weigh(ctx, s)
			if err != nil {
				return nil, err
			}
			empty = append(empty, w)
		}
		o, err := fill(ctx, t, 0, nodePods, nodeAtOnce)
		if err != nil {
			return nil, err
		}
		ups = append(ups, []float64{o.rate()})
		if serves {
			w, err := weigh(ctx, s)
			if err != nil {
				return nil, err
			}
			full = append(full, w)
		}
		if o, err = drain(ctx, t, nodePods, nodeAtOnce); err != nil {
			return nil, err
		}
		downs = append(downs, []float64{o.rate()})
	}
	speed := compare(fmt.Sprintf("%d pods with %s, %d at once: pods per second", nodePods, handler, nodeAtOnce), 0, c.names()...)
	speed.line("up", ups...)
	speed.line("down", downs...)
	return []table{speed.table, idleTable(empty, full, c.names()[1:])}, nil
}

// pods are named by number.
func podName(i int) string { return fmt.Sprintf("pod-%d", i) }

// fill runs the pods from one number up to another, and looks at the last.
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

// drain removes so many of them.
func drain(ctx context.Context, t target, count, atOnce int) (outcome, error) {
	return accounted(ctx, t, count, atOnce, func(ctx context.Context, i int) (life, error) { return down(ctx, t, podName(i)) })
}

// weight is memory in KiB (Pss), and CPU in ms a second.
type weight struct {
	server, helpers, pauses float64
	cpu                     float64 // of all together
}

// weigh leaves out the containers themselves, which are the same everywhere.
func weigh(ctx context.Context, s *server) (w weight, err error) {
	before, err := s.cpu()
	if err != nil {
		return w, err
	}
	select {
	case <-time.After(idleTime):
	case <-ctx.Done():
		return w, context.Cause(ctx)
	}
	after, err := s.cpu()
	if err != nil {
		return w, err
	}
	w.cpu = (after - before) * 1e3 / idleTime.Seconds()
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

func idleTable(empty, full []weight, names []string) table {
	t := compare(fmt.Sprintf("Idle nodes: memory (Pss) and CPU in %v; the containers are not in it", idleTime), 0, names...)
	line := func(name string, all []weight, of func(w weight) float64) {
		var samples [][]float64
		for _, w := range all {
			samples = append(samples, []float64{of(w)})
		}
		t.line(name, samples...)
	}
	line("server MiB without pods", empty, func(w weight) float64 { return w.server / 1024 })
	line(fmt.Sprintf("server MiB with %d pods", nodePods), full, func(w weight) float64 { return w.server / 1024 })
	line("KiB a pod: monitor or shim", full, func(w weight) float64 { return w.helpers / nodePods })
	line("KiB a pod: pause", full, func(w weight) float64 { return w.pauses / nodePods })
	line("MiB in all", full, func(w weight) float64 { return (w.server + w.helpers + w.pauses) / 1024 })
	line("CPU ms a second without pods", empty, func(w weight) float64 { return w.cpu })
	line(fmt.Sprintf("CPU ms a second with %d pods", nodePods), full, func(w weight) float64 { return w.cpu })
	return t.table
}
