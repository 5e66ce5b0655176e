package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/node"
)

// idleTime is how long a node is left alone to see what it uses.
const idleTime = 10 * time.Second

// nodeRow weighs a node without pods and with statsPods of them, one container
// each, and asks it what kubelets ask all the time.
func nodeRow(ctx context.Context) (tables []table, err error) {
	n, err := node.New(ctx, node.Options{Config: `log_level = "info"`})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.Start(ctx); err != nil {
		return nil, err
	}
	empty, err := weigh(ctx, n)
	if err != nil {
		return nil, err
	}
	if err := fill(ctx, n); err != nil {
		return nil, err
	}
	full, err := weigh(ctx, n)
	if err != nil {
		return nil, err
	}
	memory := table{
		title: fmt.Sprintf("An idle node: memory (Pss) and CPU, %v after the last call", idleTime),
		head:  []string{"", "no pods", fmt.Sprintf("%d pods", statsPods)},
	}
	memory.add("server MiB", fmt.Sprintf("%.1f", empty.server/1024), fmt.Sprintf("%.1f", full.server/1024))
	memory.add("KiB per monitor", "", fmt.Sprintf("%.0f", full.monitors/statsPods))
	memory.add("all of crius MiB", fmt.Sprintf("%.1f", empty.server/1024), fmt.Sprintf("%.1f", (full.server+full.monitors)/1024))
	memory.add("server's ms of CPU a second", fmt.Sprintf("%.2f", empty.cpu*1e3), fmt.Sprintf("%.2f", full.cpu*1e3))

	calls, err := asked(ctx, n)
	return []table{memory, calls}, err
}

// weight is in KiB, and in seconds of CPU a second.
type weight struct{ server, monitors, cpu float64 }

func weigh(ctx context.Context, n *node.Node) (w weight, err error) {
	before, err := cpuSeconds(n.PID())
	if err != nil {
		return w, err
	}
	select {
	case <-time.After(idleTime):
	case <-ctx.Done():
		return w, context.Cause(ctx)
	}
	after, err := cpuSeconds(n.PID())
	if err != nil {
		return w, err
	}
	w.cpu = (after - before) / idleTime.Seconds()
	if w.server, err = pss(n.PID()); err != nil {
		return w, err
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return w, err
	}
	for _, p := range processes {
		line, _ := os.ReadFile(p + "/cmdline")
		program, rest, _ := strings.Cut(string(line), "\x00")
		if filepath.Base(program) != "crius-conmon" || !strings.Contains(rest, n.RunRoot()+"/") {
			continue
		}
		var pid int
		if _, err := fmt.Sscan(filepath.Base(p), &pid); err != nil {
			return w, err
		}
		kib, err := pss(pid)
		if err != nil {
			return w, err
		}
		w.monitors += kib
	}
	return w, nil
}

// asked times what a kubelet asks of a node with pods.
func asked(ctx context.Context, n *node.Node) (table, error) {
	const calls = 2000
	r := n.Runtime()
	t := table{title: fmt.Sprintf("Calls to a node with %d pods, %d of each: ms", statsPods, calls), head: []string{"", "p50", "p99"}}
	listed, err := r.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return t, err
	}
	if len(listed.Containers) != statsPods {
		return t, fmt.Errorf("there are %d containers instead of %d", len(listed.Containers), statsPods)
	}
	c := listed.Containers[0]
	for _, call := range []struct {
		name string
		ask  func() error
	}{
		{"ListPodSandbox", func() error { _, err := r.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{}); return err }},
		{"ListContainers", func() error { _, err := r.ListContainers(ctx, &cri.ListContainersRequest{}); return err }},
		{"PodSandboxStatus", func() error {
			_, err := r.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: c.PodSandboxId})
			return err
		}},
		{"ContainerStatus", func() error {
			_, err := r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.Id})
			return err
		}},
		{"Status", func() error { _, err := r.Status(ctx, &cri.StatusRequest{}); return err }},
	} {
		var took []float64
		for range calls {
			began := time.Now()
			if err := call.ask(); err != nil {
				return t, fmt.Errorf("%s: %w", call.name, err)
			}
			took = append(took, time.Since(began).Seconds()*1e3)
		}
		t.add(call.name, fmt.Sprintf("%.2f", median(took)), fmt.Sprintf("%.2f", percentile(took, 99)))
	}
	return t, nil
}
