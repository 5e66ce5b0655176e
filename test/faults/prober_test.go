package faults

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// prober is a pod beside the one with the fault. It checks whether List and
// Status keep answering, and whether its own containers can be created and run.
type prober struct {
	pod       *scene.Pod
	container *scene.Container

	stop, ended chan struct{}
	rounds      atomic.Int64 // requests that have been answered
	failed      error        // valid once ended is closed
}

// watch begins to send requests, again and again.
func watch(t *testing.T, w *scene.World) *prober {
	t.Helper()
	p := w.Pod(t, "runc")
	v := &prober{pod: p, container: p.Start(t, "sleep"), stop: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(v.ended)
		pause := time.NewTicker(20 * time.Millisecond)
		defer pause.Stop()
		for v.failed == nil {
			select {
			case <-v.stop:
				return
			case <-pause.C:
				v.failed = v.ask()
				v.rounds.Add(1)
			}
		}
	}()
	return v
}

// ask sends a kubelet's four frequent requests.
func (v *prober) ask() error {
	ctx, r := context.Background(), v.pod.World.Runtime()
	if _, err := r.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{}); err != nil {
		return err
	}
	if _, err := r.ListContainers(ctx, &cri.ListContainersRequest{}); err != nil {
		return err
	}
	if _, err := r.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: v.pod.ID}); err != nil {
		return err
	}
	_, err := r.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: v.container.ID})
	return err
}

// answered waits until requests that were sent from now on have been answered.
func (v *prober) answered(t *testing.T) {
	t.Helper()
	now := v.rounds.Load() // the next one may have begun before
	wait.For(t, "List and Status to answer during the fault", func() bool {
		select {
		case <-v.ended:
			return true
		default:
			return v.rounds.Load() >= now+2
		}
	})
}

// works checks during a fault that List and Status answer, and that other
// containers and pods can be created and run.
func (v *prober) works(t *testing.T) {
	t.Helper()
	v.answered(t)
	v.pod.Finish(t, "echo runs")
	v.pod.World.Pod(t, "crun").Finish(t, "echo runs")
}

// unaffected stops the requests, and checks that all were answered. Call it
// before the fault ends: a request that waits for that end has no answer yet.
func (v *prober) unaffected(t *testing.T) {
	t.Helper()
	v.answered(t)
	close(v.stop)
	<-v.ended
	if v.failed != nil {
		t.Errorf("a call failed during the fault: %v", v.failed)
	}
}
