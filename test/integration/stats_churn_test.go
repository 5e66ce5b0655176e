package integration

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/inventory"
	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
)

// Pods may vanish at any moment of a measurement (cri-o#10206): lists never
// fail because of it, and nothing remains held.
func TestStatsWhilePodsComeAndGo(t *testing.T) {
	t.Parallel()
	w := private(t, node.Options{})
	churn := func(pods int) {
		var group sync.WaitGroup
		for worker := range 2 {
			group.Go(func() {
				for i := range pods {
					if err := w.life(t.Context(), fmt.Sprintf("churn-%d-%d", worker, i), handlers[i%2], 0); err != nil {
						t.Error(err)
					}
				}
			})
		}
		group.Wait()
	}
	var readings atomic.Int64
	measure := func(pods int) {
		ctx, stop := context.WithCancel(t.Context())
		var readers sync.WaitGroup
		for range 2 {
			readers.Go(func() { w.measureAll(ctx, t, &readings) })
		}
		churn(pods)
		stop()
		readers.Wait()
	}
	measure(1) // what a busy server keeps anyway: connections, caches
	before := w.load(t)
	for readings.Store(0); readings.Load() < 32 && !t.Failed(); {
		measure(5)
	}
	var now inventory.Load
	if !wait.Until(t.Context(), func() bool { now = w.load(t); return now.Total() <= before.Total()+2 }) {
		t.Errorf("file descriptors went from %d to %d\nbefore: %v\n after: %v", before.Total(), now.Total(), before.FDs, now.FDs)
	}
}

// measureAll requests all stats in all ways, 50 times a second if the machine
// can, until ctx ends. It counts how often.
func (w *world) measureAll(ctx context.Context, t *testing.T, readings *atomic.Int64) {
	r := w.Runtime()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	wrong := func(verb string, err error) bool {
		if err == nil || ctx.Err() != nil {
			return false
		}
		t.Errorf("%s: %v", verb, err)
		return true
	}
	for ; ctx.Err() == nil; readings.Add(1) {
		<-tick.C
		containers, err := r.ListContainerStats(ctx, &cri.ListContainerStatsRequest{})
		if wrong("ListContainerStats", err) {
			return
		}
		for _, s := range containers.GetStats() {
			_, err := r.ContainerStats(ctx, &cri.ContainerStatsRequest{ContainerId: s.Attributes.Id})
			if status.Code(err) != codes.NotFound && wrong("ContainerStats", err) {
				return
			}
		}
		pods, err := r.ListPodSandboxStats(ctx, &cri.ListPodSandboxStatsRequest{})
		if wrong("ListPodSandboxStats", err) {
			return
		}
		for _, s := range pods.GetStats() {
			_, err := r.PodSandboxStats(ctx, &cri.PodSandboxStatsRequest{PodSandboxId: s.Attributes.Id})
			if status.Code(err) != codes.NotFound && wrong("PodSandboxStats", err) {
				return
			}
		}
		metrics, err := r.ListPodSandboxMetrics(ctx, &cri.ListPodSandboxMetricsRequest{})
		if wrong("ListPodSandboxMetrics", err) {
			return
		}
		onceEach(t, metrics.GetPodMetrics())
	}
}

// onceEach checks that no series appears twice: a kubelet would show none.
func onceEach(t *testing.T, pods []*cri.PodSandboxMetrics) {
	seen := map[string]bool{}
	check := func(metrics []*cri.Metric) {
		for _, m := range metrics {
			series := m.Name + "\x00" + strings.Join(m.LabelValues, "\x00")
			if seen[series] {
				t.Errorf("%q is there twice", series)
			}
			seen[series] = true
		}
	}
	for _, p := range pods {
		check(p.Metrics)
		for _, c := range p.ContainerMetrics {
			check(c.Metrics)
		}
	}
}
