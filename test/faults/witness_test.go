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

	stop    chan struct{}
	reading sync.WaitGroup
	reads   []time.Duration
	idle    []time.Duration // what calls took in between that read nothing
	failed  error
}

// A machine that is busy with other tests slows down all calls alike, and a read
// that waits for a fault is slow by itself; on a quiet one it takes a
// millisecond or two.
const (
	tolerable = time.Second     // a p99, and
	ratio     = 5               // how many times that of calls that read nothing
	blocked   = 4 * time.Second // shorter than a fault lasts
)

// watch begins to look on.
func watch(t *testing.T, w *scene.World) *witness {
	t.Helper()
	p := w.Pod(t, "runc")
	v := &witness{pod: p, container: p.Start(t, "sleep"), stop: make(chan struct{})}
	v.reading.Go(func() {
		ticker := time.NewTicker(10 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				v.reads = append(v.reads, v.read(context.Background()))
				v.idle = append(v.idle, v.readNothing(context.Background()))
			case <-v.stop:
				return
			}
		}
	})
	return v
}

// read asks the four questions that a kubelet asks all the time and tells how
// long the slowest answer took.
func (v *witness) read(ctx context.Context) time.Duration {
	r := v.pod.World.Runtime()
	return v.slowest(
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
	)
}

// readNothing asks as often what the server knows by itself.
func (v *witness) readNothing(ctx context.Context) time.Duration {
	version := func() error {
		_, err := v.pod.World.Runtime().Version(ctx, &cri.VersionRequest{})
		return err
	}
	return v.slowest(version, version, version, version)
}

func (v *witness) slowest(calls ...func() error) (slowest time.Duration) {
	for _, call := range calls {
		began := time.Now()
		if err := call(); err != nil && v.failed == nil {
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
	read, idle, slowest := p99(v.reads), p99(v.idle), slices.Max(v.reads)
	t.Logf("List and Status: p99 %v, slowest %v over %d reads during the fault; p99 %v of calls that read nothing", read, slowest, len(v.reads), idle)
	if read > max(tolerable, ratio*idle) {
		t.Errorf("reads had a p99 of %v during the fault, calls that read nothing %v", read, idle)
	}
	if slowest > blocked {
		t.Errorf("a read took %v during the fault", slowest)
	}
}
