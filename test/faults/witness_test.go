package faults

import (
	"context"
	"errors"
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
	reads   asking
	idle    asking // of what needs no reading, at the same time
}

// asking is what calls took, and the first that failed.
type asking struct {
	times  []time.Duration
	failed error
}

// A machine that is busy with other tests slows down all calls alike, and a read
// that waits for a fault is slow by itself; on a quiet one it takes a
// millisecond or two.
const (
	tolerable = time.Second     // a p99, and
	ratio     = 5               // how many times that of calls that read nothing
	blocked   = 4 * time.Second // shorter than a fault lasts, and
	stalled   = 2               // how many times as long as the slowest that reads nothing
)

// watch begins to look on.
func watch(t *testing.T, w *scene.World) *witness {
	t.Helper()
	p := w.Pod(t, "runc")
	v := &witness{pod: p, container: p.Start(t, "sleep"), stop: make(chan struct{})}
	v.reading.Go(func() { v.reads.goOn(v.stop, v.questions(context.Background())) })
	v.reading.Go(func() { v.idle.goOn(v.stop, v.trifles(context.Background())) })
	return v
}

// goOn makes the calls time and again, and notes how long the slowest took.
func (a *asking) goOn(stop <-chan struct{}, calls []func() error) {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			a.times = append(a.times, a.slowest(calls))
		case <-stop:
			return
		}
	}
}

// questions are the four that a kubelet asks all the time.
func (v *witness) questions(ctx context.Context) []func() error {
	r := v.pod.World.Runtime()
	return []func() error{
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
	}
}

// trifles are as many, of what the server knows by itself.
func (v *witness) trifles(ctx context.Context) []func() error {
	version := func() error {
		_, err := v.pod.World.Runtime().Version(ctx, &cri.VersionRequest{})
		return err
	}
	return []func() error{version, version, version, version}
}

func (a *asking) slowest(calls []func() error) (slowest time.Duration) {
	for _, call := range calls {
		began := time.Now()
		if err := call(); err != nil && a.failed == nil {
			a.failed = err
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
	if took := time.Since(began); took > time.Minute {
		t.Errorf("to make and run others took %v", took)
	}
}

// unaffected ends the looking on, and checks that readers did not wait.
func (v *witness) unaffected(t *testing.T) {
	t.Helper()
	close(v.stop)
	v.reading.Wait()
	if err := errors.Join(v.reads.failed, v.idle.failed); err != nil {
		t.Errorf("a call failed during the fault: %v", err)
	}
	if len(v.reads.times) == 0 || len(v.idle.times) == 0 {
		t.Fatal("nothing was read during the fault")
	}
	read, idle, slowest, slowestIdle := p99(v.reads.times), p99(v.idle.times), slices.Max(v.reads.times), slices.Max(v.idle.times)
	t.Logf("List and Status: p99 %v, slowest %v over %d reads during the fault; p99 %v, slowest %v of calls that read nothing", read, slowest, len(v.reads.times), idle, slowestIdle)
	if read > max(tolerable, ratio*idle) {
		t.Errorf("reads had a p99 of %v during the fault, calls that read nothing %v", read, idle)
	}
	if slowest > max(blocked, stalled*slowestIdle) {
		t.Errorf("a read took %v during the fault, a call that reads nothing %v at most", slowest, slowestIdle)
	}
}
