package integration

import (
	"context"
	"maps"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
	"github.com/crius-run/crius/test/scene"
)

// brittleCriu is a node with criu whose handler "brittle" is a runc that can be told to fail; false without criu.
func brittleCriu(t *testing.T) (*world, *faulty, bool) {
	t.Helper()
	if _, ok := dumps(t); !ok {
		return nil, nil, false
	}
	options, err := withCriu(t.Context())
	must(t, err)
	options.Config += `[runtime.handlers.brittle]
path = "{{.Path "brittle" "runtime"}}"
`
	w := private(t, options)
	runc, err := exec.LookPath("runc")
	must(t, err)
	runtime := install(t, w.Path("brittle"), "runtime", runc)
	must(t, w.settle(t.Context(), "brittle"))
	return w, runtime, true
}

// hanging reports whether a runtime that has been told so never returns.
func hanging(words string) bool { return strings.HasPrefix(words, "hang") }

// ask makes a call at which the runtime does what words say. If that is to hang, the call gets a short deadline, and
// a longer one until the runtime has come to hang: how long that takes on a busy machine is not known before.
func (f *faulty) ask(t *testing.T, verb, words string, call func(ctx context.Context, limit time.Duration) error) error {
	t.Helper()
	for limit := 2 * time.Second; hanging(words) && limit < wait.Limit; limit *= 2 {
		before := f.calls(t, verb, "hangs")
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		err := call(ctx, limit)
		cancel()
		if status.Code(err) != codes.DeadlineExceeded || !maps.Equal(before, f.calls(t, verb, "hangs")) {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	return call(ctx, wait.Limit)
}

// A checkpoint fails if the runtime fails before or after it has written the container, hangs, or only claims to
// have done it. The error has the reason, nothing is left in the caller's directory, and the container goes on.
func TestRuntimeThatFailsToCheckpoint(t *testing.T) {
	t.Parallel()
	w, runtime, ok := brittleCriu(t)
	if !ok {
		return
	}
	p, out := w.run(t, "brittle"), w.dir(t)
	c := p.start(t, "lines 1000000000 20ms")
	c.says(t, "line 1")
	archive := func(ctx context.Context, limit int64) (err error) {
		wait.For(t, "the checkpoint before to be over", func() bool { // its client may be gone first
			_, err = w.Runtime().CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: c.id, Location: filepath.Join(out, "x.tar"), Timeout: limit})
			return status.Code(err) != codes.Unavailable
		})
		return err
	}
	for _, fault := range []struct {
		words, says string
		code        codes.Code
	}{
		{"fail not today", "not today", codes.Unknown},
		{"after half done", "half done", codes.Unknown},
		{"die", "signal: killed", codes.Unknown},
		{"dieafter", "signal: killed", codes.Unknown},
		{"garbage", "reports success, but has written no images", codes.Unknown},
		{"hang", "", codes.DeadlineExceeded},
		{"hangafter", "", codes.DeadlineExceeded},
	} {
		runtime.does(t, "checkpoint", fault.words)
		err := runtime.ask(t, "checkpoint", fault.words, func(_ context.Context, limit time.Duration) error {
			return archive(t.Context(), int64(limit/time.Second))
		})
		t.Logf("container, %s: %v", fault.words, err)
		wantCode(t, err, fault.code, fault.says)
		empty(t, out)

		err = runtime.ask(t, "checkpoint", fault.words, func(ctx context.Context, _ time.Duration) error {
			_, err := w.Runtime().CheckpointPod(ctx, &cri.CheckpointPodRequest{PodSandboxId: p.id, OutputPath: out, ContainerIds: []string{c.id}})
			return err
		})
		t.Logf("pod, %s: %v", fault.words, err)
		wantCode(t, err, fault.code, fault.says)
		wait.For(t, "the directory to be empty", func() bool { return len(names(t, out)) == 0 }) // the client may be gone first
		c.goesOnCounting(t)
	}
	runtime.heal(t)
	must(t, archive(t.Context(), scene.LimitSeconds))
	c.goesOnCounting(t)
}

// A restore fails if the runtime fails before the processes are there, hangs, or only claims to have restored
// them. Nothing is left of the pod. The same checkpoint can be restored afterwards.
func TestRuntimeThatFailsToRestore(t *testing.T) {
	t.Parallel()
	w, runtime, ok := brittleCriu(t)
	if !ok {
		return
	}
	p := w.run(t, "brittle")
	c := p.start(t, "lines 1000000000 20ms")
	c.says(t, "line 1")
	dir := p.checkpointed(t, c)
	p.vanish(t)
	request := func() *cri.RestorePodRequest {
		req := w.restoring(t, dir, c)
		req.RuntimeHandler = "brittle"
		return req
	}
	before := mustInventory(t, w)
	for _, fault := range []struct {
		words, says string
		code        codes.Code
	}{
		{"fail not today", "not today", codes.Unknown},
		{"die", "killed by signal 9", codes.Unknown},
		{"garbage", "without holding it", codes.Unknown},
		{"hang", "", codes.DeadlineExceeded},
	} {
		runtime.does(t, "restore", fault.words)
		req := request()
		err := runtime.ask(t, "restore", fault.words, func(ctx context.Context, _ time.Duration) error {
			wait.For(t, "the pod before to be gone", func() bool { return w.podsNamed(t, req.Config.Metadata.Name) == 0 })
			_, err := w.Runtime().RestorePod(ctx, req)
			return err
		})
		t.Logf("%s: %v", fault.words, err)
		wantCode(t, err, fault.code, fault.says)
		wait.For(t, "the pod to be gone", func() bool { return w.podsNamed(t, req.Config.Metadata.Name) == 0 })
		w.Restored(t, before)
	}
	runtime.heal(t)
	t.Run("after the start", func(t *testing.T) { w.failsAfterRestore(t, runtime, request) })
}

// failsAfterRestore has the runtime fail once the restored container has been started: it ends then, and can be
// removed.
func (w *world) failsAfterRestore(t *testing.T, runtime *faulty, request func() *cri.RestorePodRequest) {
	t.Helper()
	for _, fault := range []struct{ words, says string }{
		{"after half done", "could not resume the container: exit code 1"},
		{"dieafter", "could not resume the container: exit code 137"},
		{"hangafter", ""},
	} {
		runtime.does(t, "restore", fault.words)
		_, all := w.restore(t, request())
		result := make(chan error, 1)
		go func() {
			_, err := w.Runtime().StartContainer(context.WithoutCancel(t.Context()), &cri.StartContainerRequest{ContainerId: all[0].id})
			result <- err
		}()
		if hanging(fault.words) { // it runs, and ends when it is told so
			all[0].number(t)
			all[0].stop(t, 0)
			equal(t, "exit code", all[0].wait(t).ExitCode, 137)
		}
		err := <-result
		t.Logf("%s: %v", fault.words, err)
		if !hanging(fault.words) {
			wantCode(t, err, codes.Unknown, fault.says)
			equal(t, "reason", all[0].wait(t).Reason, "StartError")
		}
		all[0].remove(t)
		runtime.heal(t)
	}
	_, all := w.restore(t, request())
	all[0].start(t)
	all[0].number(t)
}
