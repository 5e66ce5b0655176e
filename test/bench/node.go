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
	var servers []filled
	for _, s := range []*server{us, them} {
		f, err := nodeOf(ctx, s, pods)
		if err != nil {
			return nil, err
		}
		servers = append(servers, f)
	}
	idle := idleTable(c.names(), pods, servers)
	if err := c.bare(ctx); err != nil {
		return nil, err
	}
	if err := c.addFloor(ctx, us); err != nil { // only now, since its pod would weigh, too
		return nil, err
	}
	ground, err := nodeOf(ctx, c.targets[0], pods)
	if err != nil {
		return nil, err
	}
	speed := compare(fmt.Sprintf("%d pods with %s, %d at once: pods per second", pods, handler, nodeAtOnce), 0, c.names()...)
	speed.line("up", []float64{ground.up.rate()}, []float64{servers[0].up.rate()}, []float64{servers[1].up.rate()})
	speed.line("down", []float64{ground.down.rate()}, []float64{servers[0].down.rate()}, []float64{servers[1].down.rate()})
	return []table{speed.table, idle}, nil
}

// filled is how a node was filled and emptied, and its weight before and between.
type filled struct {
	up, down    outcome
	empty, full weight
}

func nodeOf(ctx context.Context, t target, pods int) (f filled, err error) {
	s, serves := t.(*server)
	if serves {
		if f.empty, err = weigh(ctx, s); err != nil {
			return f, err
		}
	}
	if f.up, err = fill(ctx, t, 0, pods, nodeAtOnce); err != nil {
		return f, err
	}
	if serves {
		if f.full, err = weigh(ctx, s); err != nil {
			return f, err
		}
	}
	f.down, err = drain(ctx, t, pods, nodeAtOnce)
	return f, err
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

func idleTable(names []string, pods int, all []filled) table {
	t := compare(fmt.Sprintf("Idle nodes: memory (Pss) and CPU in %v; the containers are not in it", idleTime), 0, names...)
	line := func(name string, of func(f filled) float64) {
		var samples [][]float64
		for _, f := range all {
			samples = append(samples, []float64{of(f)})
		}
		t.line(name, samples...)
	}
	line("server MiB without pods", func(f filled) float64 { return f.empty.server / 1024 })
	line(fmt.Sprintf("server MiB with %d pods", pods), func(f filled) float64 { return f.full.server / 1024 })
	line("KiB a pod: monitor or shim", func(f filled) float64 { return f.full.helpers / float64(pods) })
	line("KiB a pod: pause", func(f filled) float64 { return f.full.pauses / float64(pods) })
	line("MiB in all", func(f filled) float64 { return (f.full.server + f.full.helpers + f.full.pauses) / 1024 })
	line("CPU ms a second without pods", func(f filled) float64 { return f.empty.cpu })
	line(fmt.Sprintf("CPU ms a second with %d pods", pods), func(f filled) float64 { return f.full.cpu })
	return t.table
}
