package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	statsPods   = nodePods
	statsRounds = 200
)

// statsRow requests all stats from a node with statsPods pods, of one container
// each. CPU is the server's CPU time for a call, all its threads together.
func statsRow(ctx context.Context) (tables []table, err error) {
	s, err := newCrius(ctx, "crun")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	s.cgroup = func(uid string) string { return s.on.CgroupParent() + "/pod" + uid }
	if _, err := fill(ctx, s, 0, statsPods, nodeAtOnce); err != nil {
		return nil, err
	}
	r := s.runtime()
	t := table{
		title: fmt.Sprintf("Stats of %d pods with a container each, %d calls", statsPods, statsRounds),
		head:  []string{"", "p50 ms", "CPU ms per pod"},
	}
	size := 0
	for _, call := range []struct {
		name string
		ask  func() (int, error)
	}{
		{"ListContainerStats", func() (int, error) {
			resp, err := r.ListContainerStats(ctx, &cri.ListContainerStatsRequest{})
			return len(resp.GetStats()), err
		}},
		{"ListPodSandboxStats", func() (int, error) {
			resp, err := r.ListPodSandboxStats(ctx, &cri.ListPodSandboxStatsRequest{})
			return len(resp.GetStats()), err
		}},
		{"ListPodSandboxMetrics", func() (int, error) {
			resp, err := r.ListPodSandboxMetrics(ctx, &cri.ListPodSandboxMetricsRequest{})
			size = proto.Size(resp)
			return len(resp.GetPodMetrics()), err
		}},
	} {
		p50, cpu, err := askOften(s.program.PID(), call.ask)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", call.name, err)
		}
		t.add(call.name, fmt.Sprintf("%.2f", p50*1e3), fmt.Sprintf("%.3f", cpu*1e3/statsPods))
	}
	t.title += fmt.Sprintf("; the metrics are %.1f MB", float64(size)/1e6)
	return []table{t}, nil
}

// askOften returns the duration of a call, and its CPU time, in seconds.
func askOften(pid int, ask func() (int, error)) (p50, cpu float64, err error) {
	before, err := cpuSeconds(pid)
	if err != nil {
		return 0, 0, err
	}
	var took []float64
	for range statsRounds {
		began := time.Now()
		count, err := ask()
		took = append(took, time.Since(began).Seconds())
		if err == nil && count != statsPods {
			err = fmt.Errorf("stats of %d instead of %d", count, statsPods)
		}
		if err != nil {
			return 0, 0, err
		}
	}
	after, err := cpuSeconds(pid)
	return median(took), (after - before) / statsRounds, err
}

// cpuSeconds returns the CPU time of a process, by its clock (see
// clock_getcpuclockid(3)), which is finer than /proc.
func cpuSeconds(pid int) (float64, error) {
	const ofProcess = 2
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|ofProcess), &t); err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return float64(t.Nano()) / 1e9, nil
}
