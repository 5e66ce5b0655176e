package runtimes

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
			var memory []int
			for range rounds {
				r := round(t, w, handler)
				for i, lap := range r.laps {
					laps[i] = append(laps[i], lap)
				}
				memory = append(memory, r.memory)
			}
			for i, name := range lapNames {
				slices.Sort(laps[i])
				results.measured(handler, name, fmt.Sprintf("%d ms", laps[i][rounds/2].Milliseconds()))
			}
			slices.Sort(memory)
			results.measured(handler, "memory", fmt.Sprintf("%d MiB", memory[rounds/2]>>20))
		})
	}
}

var lapNames = [...]string{"pod", "create", "start", "second", "exec", "stop", "remove"}

// lap is one pod from its creation to its end: the times of its steps, and what a pod of two
// containers that do nothing takes, without the server.
type lap struct {
	laps   [len(lapNames)]time.Duration
	memory int
}

func round(t *testing.T, w *scene.World, handler string) (l lap) {
	t.Helper()
	var pod, first, second string
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
			var err error
			if second, err = create("two"); err == nil {
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
		l.laps[i] = time.Since(began)
		if lapNames[i] == "exec" {
			l.memory = memoryOf(pod, first, second)
		}
	}
	return l
}

// memoryOf returns the memory of the processes that have one of the ids in their command lines or cgroups; what
// several of them share counts once.
func memoryOf(ids ...string) (bytes int) {
	procs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is well-formed
	for _, proc := range procs {
		line, _ := os.ReadFile(proc + "/cmdline")
		cgroups, _ := os.ReadFile(proc + "/cgroup")
		of := string(line) + string(cgroups)
		if !slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(of, id) }) {
			continue
		}
		used, _ := os.ReadFile(proc + "/smaps_rollup") // it may have ended
		for line := range strings.Lines(string(used)) {
			kibibytes := 0
			if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kibibytes); n == 1 {
				bytes += kibibytes << 10
			}
		}
	}
	return bytes
}

func (l *ledger) measured(handler, step, what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.Contains(l.steps, step) {
		l.steps = append(l.steps, step)
	}
	if l.times[handler] == nil {
		l.times[handler] = map[string]string{}
	}
	l.times[handler][step] = what
}
