package faults

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/scene"
)

// witness is a pod beside the one that meets the fault. It sees whether
// readers wait, and whether its own containers can be made and run.
type witness struct {
	pod       *scene.Pod
	container *scene.Container
	calm      time.Duration // the slowest but 1 % of reads before the fault

	stop    chan struct{}
	reading sync.WaitGroup
	reads   []time.Duration
	failed  error
}

const (
	calmReads = 100
	// tolerable is how slow a read may be on a machine that is busy with other
	// tests; on a quiet one it takes a millisecond or two.
	tolerable = 150 * time.Millisecond
)

// watch begins to look on.
func watch(t *testing.T, w *scene.World) *witness {
	t.Helper()
	p := w.Pod(t, "runc")
	v := &witness{pod: p, container: p.Start(t, "sleep"), stop: make(chan struct{})}
	var calm []time.Duration
	for range calmReads {
		calm = append(calm, v.read(t.Context()))
	}
	if v.failed != nil {
		t.Fatal(v.failed)
	}
	v.calm = p99(calm)
	v.reading.Go(func() {
		ticker := time.NewTicker(10 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				v.reads = append(v.reads, v.read(context.Background()))
			case <-v.stop:
				return
			}
		}
	})
	return v
}

// read asks the four questions that a kubelet asks all the time and tells how
// long the slowest answer took.
func (v *witness) read(ctx context.Context) (slowest time.Duration) {
	r := v.pod.World.Runtime()
	for _, ask := range []func() error{
		func() error { _, err := r.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{}); return err },
		func() error { _, err := r.ListContainers(ctx, &cri.ListContainersRequest{}); return err },
		func() error {
			_, err := r.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: v.pod.ID})
			return err
		},
		func() error {
			_, err := r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: v.container.ID})
			return err
		},
	} {
		began := time.Now()
		if err := ask(); err != nil && v.failed == nil {
			v.failed = err
		}
		slowest = max(slowest, time.Since(began))
	}
	return slowest
}

func p99(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[(len(all)-1)*99/100]
}

// works checks in the midst of a fault that others can make and run containers,
// and pods if that is not what is at fault.
func (v *witness) works(t *testing.T, pods bool) {
	t.Helper()
	began := time.Now()
	v.pod.Finish(t, "echo runs")
	if pods {
		v.pod.World.Pod(t, "crun").Finish(t, "echo runs")
	}
	if took := time.Since(began); took > scene.Patience {
		t.Errorf("to make and run others took %v", took)
	}
}

// unaffected ends the looking on, and checks that readers did not wait.
func (v *witness) unaffected(t *testing.T) {
	t.Helper()
	close(v.stop)
	v.reading.Wait()
	if v.failed != nil {
		t.Errorf("a read failed during the fault: %v", v.failed)
	}
	if len(v.reads) == 0 {
		t.Fatal("nothing was read during the fault")
	}
	worst := p99(v.reads)
	t.Logf("List and Status: p99 %v over %d reads during the fault, %v before", worst, len(v.reads), v.calm)
	if worst > max(tolerable, 5*v.calm) {
		t.Errorf("reads had a p99 of %v during the fault, %v before", worst, v.calm)
	}
}
