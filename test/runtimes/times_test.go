package runtimes

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/images"
	"github.com/crius-run/crius/test/kit/kubelet"
	"github.com/crius-run/crius/test/scene"
)

// TestTimes measures a pod with one container: the median of a few, one after
// the other, without concurrent tests. It fails only if something hangs.
func TestTimes(t *testing.T) {
	w := commons.World(t)
	for _, handler := range wanted() {
		t.Run(handler, func(t *testing.T) {
			t.Cleanup(func() { results.note(handler, t) })
			if err := missing[handler]; err != nil {
				t.Skipf("NOT TESTED, there is no %s: %v", handler, err)
			}
			const rounds = 5
			var laps [len(lapNames)][]time.Duration
			for range rounds {
				for i, lap := range round(t, w, handler) {
					laps[i] = append(laps[i], lap)
				}
			}
			for i, name := range lapNames {
				slices.Sort(laps[i])
				results.time(handler, name, laps[i][rounds/2])
			}
		})
	}
}

var lapNames = [...]string{"pod", "create", "start", "second", "exec", "stop", "remove"}

// round is one pod from its creation to its end.
func round(t *testing.T, w *scene.World, handler string) (laps [len(lapNames)]time.Duration) {
	t.Helper()
	var pod, first string
	r := w.Runtime()
	config := w.PodConfig(t)
	create := func(name string) (string, error) {
		resp, err := r.CreateContainer(t.Context(), &cri.CreateContainerRequest{
			PodSandboxId: pod, SandboxConfig: config, Config: kubelet.Container(name, images.Probe, []string{"sleep"}),
		})
		return resp.GetContainerId(), err
	}
	start := func(id string) error {
		_, err := r.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
		return err
	}
	defer func() { // whatever failed
		_, _ = r.RemovePodSandbox(context.Background(), &cri.RemovePodSandboxRequest{PodSandboxId: pod})
	}()
	for i, step := range [len(lapNames)]func() error{
		func() error {
			resp, err := r.RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
			pod = resp.GetPodSandboxId()
			return err
		},
		func() (err error) { first, err = create("one"); return err },
		func() error { return start(first) },
		func() error {
			second, err := create("two")
			if err == nil {
				err = start(second)
			}
			return err
		},
		func() error {
			resp, err := r.ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: first, Cmd: []string{"/probe", "exit", "0"}})
			if err == nil && resp.ExitCode != 0 {
				err = fmt.Errorf("exit code %d", resp.ExitCode)
			}
			return err
		},
		func() error {
			_, err := r.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: pod})
			return err
		},
		func() error {
			_, err := r.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: pod})
			return err
		},
	} {
		began := time.Now()
		if err := step(); err != nil {
			t.Fatalf("%s: %v", lapNames[i], err)
		}
		laps[i] = time.Since(began)
	}
	return laps
}

func (l *ledger) time(handler, step string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Contains(l.steps, step) {
		l.steps = append(l.steps, step)
	}
	if l.times[handler] == nil {
		l.times[handler] = map[string]string{}
	}
	l.times[handler][step] = fmt.Sprintf("%d ms", took.Milliseconds())
}
