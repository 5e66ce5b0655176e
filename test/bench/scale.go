package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	scalePods   = 500
	scalePerPod = 4
	// scaleTime is how long a node is kept busy.
	scaleTime = time.Minute
)

// A duty is what a kubelet does again and again, however long it takes.
type duty struct {
	name  string
	every time.Duration
	do    func(ctx context.Context, s *server, pods, n int) error // for the nth time
}

// duties are those of a busy node. Two processors cannot run more probes.
var duties = []duty{
	{"a pod comes and goes", time.Second, func(ctx context.Context, s *server, _, n int) error {
		name := fmt.Sprint("passing-", n)
		if _, err := up(ctx, s, name); err != nil {
			return err
		}
		_, err := down(ctx, s, name)
		return err
	}},
	{"exec probe", 100 * time.Millisecond, func(ctx context.Context, s *server, pods, n int) error {
		_, err := s.do(ctx, podName(n%pods), execSync)
		return err
	}},
	{"relist", time.Second, func(ctx context.Context, s *server, _, _ int) error {
		if _, err := s.runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{}); err != nil {
			return err
		}
		_, err := s.runtime().ListContainers(ctx, &cri.ListContainersRequest{})
		return err
	}},
	{"stats", 10 * time.Second, func(ctx context.Context, s *server, pods, _ int) error {
		got, err := s.runtime().ListContainerStats(ctx, &cri.ListContainerStatsRequest{})
		if err == nil && len(got.Stats) < pods*scalePerPod {
			err = fmt.Errorf("%d containers have stats", len(got.Stats))
		}
		return err
	}},
}

// scaleRow gives nodes as many pods as the largest have, and the calls of a
// kubelet at fixed rates. A call that is late is counted from when it was due.
func scaleRow(ctx context.Context) (tables []table, err error) {
	pods, err := amount("PODS", scalePods)
	if err != nil {
		return nil, err
	}
	c, ours, theirs, err := newServers(ctx, "runc")
	if err != nil {
		return nil, err
	}
	defer func() { err = c.end(ctx, err) }()
	if err := c.settle(ctx); err != nil {
		return nil, err
	}
	var all []strain
	for _, s := range []*server{ours, theirs} {
		st, err := s.strained(ctx, pods)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.label, err)
		}
		all = append(all, st)
	}
	took := compare(fmt.Sprintf("%d pods with %d containers, for %v: ms", pods, pods*scalePerPod, scaleTime), 99, c.names()...)
	for i, d := range duties {
		var samples [][]float64
		for _, st := range all {
			samples = append(samples, st.took[i])
		}
		took.line(fmt.Sprintf("%s, every %v", d.name, d.every), samples...)
	}
	costs := compare("What it took meanwhile", 0, c.names()...)
	line := func(name string, of func(strain) float64) {
		var samples [][]float64
		for _, st := range all {
			samples = append(samples, []float64{of(st)})
		}
		costs.line(name, samples...)
	}
	line("CPU, of a processor", func(st strain) float64 { return st.cpu })
	line("of that, the server's", func(st strain) float64 { return st.serverCPU })
	line("MiB of server, monitors and pauses", func(st strain) float64 { return st.weight.memory() / 1024 })
	line("MiB of the server", func(st strain) float64 { return st.weight.server / 1024 })
	line("descriptors of the server", func(st strain) float64 { return float64(st.descriptors) })
	return []table{took.table, costs.table}, nil
}

// strain is what a busy minute takes.
type strain struct {
	took           [][]float64 // ms, of each duty
	cpu, serverCPU float64     // seconds per second
	weight         weight
	descriptors    int
}

// strained fills the node, keeps it busy for a while, and empties it.
func (s *server) strained(ctx context.Context, pods int) (st strain, err error) {
	if err := s.populate(ctx, pods, scalePerPod); err != nil {
		return st, err
	}
	if err := s.busy(ctx, pods, &st); err != nil {
		return st, err
	}
	if st.weight, err = weigh(ctx, s, idleTime); err != nil {
		return st, err
	}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.program.PID()))
	if err != nil {
		return st, err
	}
	st.descriptors = len(open)
	return st, s.removeAll(ctx)
}

// busy does all duties at their rates.
func (s *server) busy(ctx context.Context, pods int, st *strain) error {
	before, err := s.cpu()
	if err != nil {
		return err
	}
	serverBefore, err := cpuSeconds(s.program.PID())
	if err != nil {
		return err
	}
	began := time.Now()
	st.took = make([][]float64, len(duties))
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	for i, d := range duties {
		for n := range int(scaleTime / d.every) {
			due := began.Add(time.Duration(n) * d.every)
			group.Go(func() error {
				if err := pause(ctx, time.Until(due)); err != nil {
					return err
				}
				if err := d.do(ctx, s, pods, n); err != nil {
					return fmt.Errorf("%s: %w", d.name, err)
				}
				mu.Lock()
				defer mu.Unlock()
				st.took[i] = append(st.took[i], time.Since(due).Seconds()*1e3)
				return nil
			})
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	wall := time.Since(began).Seconds()
	after, err := s.cpu()
	serverAfter, serverErr := cpuSeconds(s.program.PID())
	st.cpu, st.serverCPU = (after-before)/wall, (serverAfter-serverBefore)/wall
	return errors.Join(err, serverErr)
}
