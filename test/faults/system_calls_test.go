package faults

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/node"
	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// inject makes system calls of the server fail until stop is called: calls is a
// list in strace's format. failed returns how many have failed, which is final
// after stop.
func inject(t *testing.T, w *scene.World, calls, failure string) (stop func(), failed func() int) {
	t.Helper()
	said, stop := attach(t, w, "-e", "trace="+calls, "-e", fmt.Sprintf("inject=%s:error=%s", calls, failure))
	return stop, func() int { return strings.Count(said.String(), "(INJECTED)") }
}

// attach has strace trace the server, and what that starts, until stop is called.
func attach(t *testing.T, w *scene.World, options ...string) (said *buffer, stop func()) {
	t.Helper()
	// A thread created by a thread that strace has not attached yet, after it has
	// listed all of them, is never traced.
	const attempts = 4
	for attempt := 1; ; attempt++ {
		said, traced, stop := trace(t, w, options...)
		if traced {
			return said, stop
		}
		stop()
		if attempt == attempts {
			t.Fatalf("strace does not attach: %s", said.String())
		}
	}
}

// trace begins to trace, and reports whether it has attached to every thread of
// the server.
func trace(t *testing.T, w *scene.World, options ...string) (said *buffer, traced bool, stop func()) {
	t.Helper()
	said = new(buffer)
	cmd := exec.Command("strace", append([]string{"-f", "-qq", "-p", strconv.Itoa(w.PID()), "-e", "signal=none"}, options...)...)
	cmd.Stderr = said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	end := func() {
		once.Do(func() {
			// The kernel detaches it. By itself it would wait for each thread to
			// stop: a thread that waits for its child's execve never stops if strace
			// has stopped the child.
			cmd.Process.Kill()
			cmd.Wait()
		})
	}
	t.Cleanup(end)
	tracer := fmt.Sprintf("TracerPid:\t%d\n", cmd.Process.Pid)
	all := func() bool {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", w.PID()))
		for _, task := range tasks {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", w.PID(), task.Name()))
			if err == nil && !bytes.Contains(status, []byte(tracer)) {
				return false
			}
		}
		return err == nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // after which another attempt is more promising
	defer cancel()
	return said, wait.Until(ctx, all), end
}

// buffer is a bytes.Buffer that may be read concurrently.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// beyondLimits calls a verb again as long as a time limit of the server's own
// ends it: strace stops the server at every system call, whichever is to fail,
// and on a busy machine that takes seconds.
func beyondLimits(verb func() error) (err error) {
	for range 5 {
		if err = verb(); status.Code(err) != codes.DeadlineExceeded {
			break
		}
	}
	return err
}

// A failing disk and a kernel without memory: a creation is refused with the
// kernel's own error text, nothing of it is left, and what must end ends.
func TestSystemCallsThatFail(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	for _, c := range []struct{ calls, failure, says string }{
		{"fsync", "EIO", "input/output error"},
		{"renameat,renameat2,rename", "EIO", "input/output error"},
		{"mkdirat,mkdir", "ENOSPC:when=2+", "no space left on device"},
		{"mount", "ENOMEM", "cannot allocate memory"},
		{"execve", "ENOMEM", "cannot allocate memory"}, // clone is unsuitable: the Go runtime ends the process
		{"socket", "EMFILE", "too many open files"},
	} {
		t.Run(c.calls+" "+c.failure, func(t *testing.T) {
			p := w.Pod(t, "crun")
			running := p.Start(t, "sleep")
			ending := w.Pod(t, "runc")
			ending.Start(t, "sleep")
			stop, failed := inject(t, w, c.calls, c.failure)
			refused := 0
			try := func(what string, verb func() error) {
				t.Helper()
				err := beyondLimits(verb)
				if err == nil {
					return
				}
				if refused++; !strings.Contains(strings.ToLower(err.Error()), c.says) {
					t.Errorf("%s: %v, want an error that says %q", what, err, c.says)
				}
			}
			var made []*scene.Pod
			var added []*scene.Container
			// strace counts the calls of each thread for itself: a verb whose calls
			// are those of several threads may get by.
			for range 10 {
				try("RunPodSandbox", func() error {
					pod, err := w.TryPod(t, "runc")
					if err == nil {
						made = append(made, pod)
					}
					return err
				})
				try("CreateContainer", func() error {
					container, err := p.Try(t.Context(), "sleep")
					if err == nil {
						added = append(added, container)
					}
					return err
				})
				if refused > 0 {
					break
				}
			}
			try("StopPodSandbox", func() error {
				_, err := w.Runtime().StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: ending.ID})
				return err
			})
			stop()
			t.Logf("%d calls and %d verbs failed", failed(), refused)
			if failed() == 0 || refused == 0 {
				t.Error("no call or no verb failed: the test is of no use")
			}
			scene.Equal(t, "state of a container that was there", running.Status(t).State, cri.ContainerState_CONTAINER_RUNNING)
			for _, c := range added {
				c.Remove(t)
			}
			for _, p := range made {
				p.Stop(t)
				p.Remove(t)
			}
			ending.Stop(t)
			ending.Remove(t)
			p.Finish(t, "echo runs")
		})
	}
}
