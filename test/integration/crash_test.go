package integration

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/testkit/inventory"
	"github.com/crius-run/crius/internal/testkit/kubelet"
	"github.com/crius-run/crius/internal/testkit/node"
)

// A name that another request has taken stays with it.
func wantTaken(t *testing.T, err error, id string) {
	t.Helper()
	wantCode(t, err, codes.AlreadyExists, id[:12])
}

// persist repeats a call, as a kubelet does, until the server answers it.
func persist[Req, Resp any](ctx context.Context, req Req, call func(context.Context, Req) (Resp, error)) (Resp, error) {
	for {
		resp, err := call(ctx, req)
		if code := status.Code(err); code != codes.Unavailable && code != codes.Canceled || ctx.Err() != nil {
			return resp, err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// life takes a pod from nothing through everything to nothing again, over
// whatever happens to the server meanwhile.
func (w *world) life(ctx context.Context, name, handler string, code int) error {
	config := kubelet.Pod(name, kubelet.LogsBelow(w.Path("logs")))
	defer os.RemoveAll(config.LogDirectory)
	r := w.Runtime()
	step := func(verb string, err error) error {
		if err != nil {
			return fmt.Errorf("%s of %s: %w", verb, name, err)
		}
		return nil
	}
	p, err := persist(ctx, &cri.RunPodSandboxRequest{Config: config, RuntimeHandler: handler}, func(ctx context.Context, q *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
		return r.RunPodSandbox(ctx, q)
	})
	if err != nil {
		return step("RunPodSandbox", err)
	}
	line := fmt.Sprintf("echo lives ; exit %d", code)
	c, err := persist(ctx, &cri.CreateContainerRequest{PodSandboxId: p.PodSandboxId, SandboxConfig: config, Config: kubelet.Container("c", probe, steps(line))},
		func(ctx context.Context, q *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
			return r.CreateContainer(ctx, q)
		})
	if err != nil {
		return step("CreateContainer", err)
	}
	_, startErr := persist(ctx, &cri.StartContainerRequest{ContainerId: c.ContainerId}, func(ctx context.Context, q *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
		return r.StartContainer(ctx, q)
	})
	// A start whose answer was lost may be refused the second time; the
	// status tells whether it has happened.
	for {
		s, err := persist(ctx, &cri.ContainerStatusRequest{ContainerId: c.ContainerId}, func(ctx context.Context, q *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
			return r.ContainerStatus(ctx, q)
		})
		if err != nil {
			return step("ContainerStatus", err)
		}
		if s.Status.State == cri.ContainerState_CONTAINER_CREATED && startErr != nil {
			return step("StartContainer", startErr)
		}
		if s.Status.State == cri.ContainerState_CONTAINER_EXITED {
			if s.Status.ExitCode != int32(code) {
				return fmt.Errorf("%s ended with code %d (%s %s), want %d", name, s.Status.ExitCode, s.Status.Reason, s.Status.Message, code)
			}
			break
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s is still %v", name, s.Status.State)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if _, err := persist(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.PodSandboxId}, func(ctx context.Context, q *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
		return r.StopPodSandbox(ctx, q)
	}); err != nil {
		return step("StopPodSandbox", err)
	}
	_, err = persist(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.PodSandboxId}, func(ctx context.Context, q *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
		return r.RemovePodSandbox(ctx, q)
	})
	return step("RemovePodSandbox", err)
}

// The server dies again and again, at any instant, while pods come and go. Each
// of them must run once and to its right end, and leave nothing.
func TestSIGKILLAtRandomInstants(t *testing.T) {
	t.Parallel()
	w := spotless(t, node.Options{})
	survivor := w.run(t, "runc")
	c := survivor.start(t, "sleep")
	full := mustInventory(t, w)

	const deaths, workers = 15, 3
	ctx, cancel := timeout(t, 3*time.Minute)
	defer cancel()
	stop := make(chan struct{})
	var group sync.WaitGroup
	lives := make([]int, workers)
	failures := make(chan error, workers)
	for i := range workers {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				lives[i]++
				name := fmt.Sprintf("crash-%d-%d", i, lives[i])
				if err := w.life(ctx, name, handlers[lives[i]%2], 1+(lives[i]%100)); err != nil {
					failures <- err
					return
				}
			}
		})
	}
	seed := time.Now().UnixNano()
	random := rand.New(rand.NewPCG(uint64(seed), 0))
	for range deaths {
		time.Sleep(time.Duration(random.IntN(700)) * time.Millisecond)
		if err := w.Crash(t.Context()); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	group.Wait()
	close(failures)
	for err := range failures {
		t.Errorf("seed %d: %v", seed, err)
	}
	t.Logf("%v lives in spite of %d deaths", lives, deaths)
	equal(t, "state of a container that was there all the time", c.status(t).State, cri.ContainerState_CONTAINER_RUNNING)
	c.exec(t, "echo alive")
	if err := w.Clean(t.Context(), full, patience); err != nil {
		t.Error(err)
		for _, line := range inventory.Diff(full, mustInventory(t, w)).Added {
			if id := anyID.FindString(line); id != "" {
				t.Fatalf("the server's log about %s:\n%s", id, w.LogAbout(20, id))
			}
		}
	}
}

var anyID = regexp.MustCompile(`[0-9a-f]{64}`)

// What a killed server had begun for a caller that never comes back goes away
// at the next start.
func TestHalfMadePodsGoAwayAtRestart(t *testing.T) {
	t.Parallel()
	w, runtime := brittle(t, "runc")
	plugin := w.cni(t)
	plugin.does(t, "ADD", "hangafter") // the address is taken, the answer never comes
	go w.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: w.podConfig(t)})
	if !eventually(func() bool { return len(plugin.calls(t, "ADD", "hangs")) > 0 }) {
		t.Fatal("the plugin was never called")
	}
	if err := w.Kill(); err != nil {
		t.Fatal(err)
	}
	plugin.heal(t)
	endHung(t, plugin.dir)
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.Clean(t.Context(), w.empty, patience); err != nil {
		t.Errorf("killed in the network set-up: %v", err)
	}

	p := w.run(t, "brittle")
	before := mustInventory(t, w)
	runtime.does(t, "create", "hangafter")
	go p.try(t.Context(), steps("sleep"))
	if !eventually(func() bool { return len(runtime.calls(t, "create", "hangs")) > 0 }) {
		t.Fatal("the runtime was never called")
	}
	if err := w.Kill(); err != nil {
		t.Fatal(err)
	}
	runtime.heal(t)
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.Clean(t.Context(), before, patience); err != nil {
		t.Errorf("killed in the container's creation: %v", err)
	}
}

// endHung kills what the failing program in dir left hanging: a plugin without
// a server is nobody's child.
func endHung(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if exe, err := os.Readlink(file); err == nil && strings.HasPrefix(exe, dir+"/") {
			var pid int
			fmt.Sscanf(file, "/proc/%d/exe", &pid)
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				t.Error(err)
			}
		}
	}
}
