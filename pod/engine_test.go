package pod

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/test/kit/wait"
)

func TestLifecycle(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	v, err := e.Sandbox(pod[:12])
	if err != nil {
		t.Fatal(err)
	}
	if v.State != cri.PodSandboxState_SANDBOX_READY || v.Handler != "fake" || !slices.Equal(v.IPs, []string{"10.0.0.1", "fd00::1"}) {
		t.Errorf("ready pod: %+v", v)
	}
	id := b.create(e, pod, "c")
	if c, _ := e.Container(id); c.State != cri.ContainerState_CONTAINER_CREATED || !c.StartedAt.IsZero() || c.PID == 0 {
		t.Errorf("created container: %+v", c)
	}
	if err := e.StartContainer(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if c, _ := e.Container(id); c.State != cri.ContainerState_CONTAINER_RUNNING || c.StartedAt.IsZero() {
		t.Errorf("running container: %+v", c)
	}
	if err := e.StartContainer(t.Context(), id); !errors.Is(err, fault.Precondition) {
		t.Errorf("second start: %v", err)
	}
	if err := e.StopContainer(t.Context(), id, time.Minute); err != nil {
		t.Fatal(err)
	}
	c, _ := e.Container(id)
	if c.State != cri.ContainerState_CONTAINER_EXITED || c.ExitCode != 143 || c.Reason != "Error" || c.PID != 0 || c.FinishedAt.IsZero() {
		t.Errorf("stopped container: %+v", c)
	}
	for range 2 {
		if err := e.StopSandbox(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	if v, _ := e.Sandbox(pod); v.State != cri.PodSandboxState_SANDBOX_NOTREADY || len(v.IPs) != 0 {
		t.Errorf("stopped pod: %+v", v)
	}
	if _, err := e.CreateContainer(t.Context(), pod, containerConfig("late"), nil); !errors.Is(err, fault.Precondition) {
		t.Errorf("container in a stopped pod: %v", err)
	}
	for range 2 {
		b.remove(e, pod)
	}
	if n := b.node.count("detach"); n != 1 {
		t.Errorf("network was given back %d times", n)
	}
	b.nothingLeft()
}

// TestUnknownIDs: CRI wants stop and remove to succeed for objects that are not there.
func TestUnknownIDs(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	ctx := t.Context()
	for verb, err := range map[string]error{
		"StopSandbox": e.StopSandbox(ctx, "beef"), "RemoveSandbox": e.RemoveSandbox(ctx, "beef"),
		"StopContainer": e.StopContainer(ctx, "beef", 0), "RemoveContainer": e.RemoveContainer(ctx, "beef"),
	} {
		if err != nil {
			t.Errorf("%s: %v", verb, err)
		}
	}
	_, errSandbox := e.Sandbox("")
	_, errContainer := e.Container("beef")
	_, errCreate := e.CreateContainer(ctx, "beef", containerConfig("c"), nil)
	_, errExec := e.ExecSync(ctx, "beef", []string{"x"}, 0)
	for verb, err := range map[string]error{
		"Sandbox": errSandbox, "Container": errContainer, "CreateContainer": errCreate, "ExecSync": errExec,
		"StartContainer": e.StartContainer(ctx, "beef"), "ReopenContainerLog": e.ReopenContainerLog(ctx, "beef"),
		"UpdateContainerResources": e.UpdateContainerResources(ctx, "beef", &cri.LinuxContainerResources{}),
	} {
		if !errors.Is(err, fault.NotFound) {
			t.Errorf("%s: %v", verb, err)
		}
	}
	if _, err := e.RunSandbox(ctx, "nope", podConfig("a")); !errors.Is(err, fault.NotFound) {
		t.Errorf("unknown handler: %v", err)
	}
}

// TestRetryGetsTheSameID answers cri-o/cri-o#7010, #8884 and #9097: an attempt that no caller
// waits for any more never reserves a name.
func TestRetryGetsTheSameID(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		release := make(chan struct{})
		b.node.block["attach"], b.node.block["create"] = release, release

		impatient := func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(t.Context(), 200*time.Millisecond)
		}
		ctx, cancel := impatient()
		defer cancel()
		if _, err := e.RunSandbox(ctx, "", podConfig("a")); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("impatient caller: %v", err)
		}
		b.awaitCalls("attach", 1)
		ids := make([]string, 5)
		var wg sync.WaitGroup
		for i := range ids {
			wg.Go(func() {
				var err error
				if ids[i], err = e.RunSandbox(t.Context(), "", podConfig("a")); err != nil {
					t.Error(err)
				}
			})
		}
		b.node.set(func() { delete(b.node.block, "attach") })
		release <- struct{}{}
		wg.Wait()
		for _, id := range ids {
			if id != ids[0] || id == "" {
				t.Fatalf("retries got different pods: %v", ids)
			}
		}
		ctx, cancel = impatient()
		defer cancel()
		if _, err := e.CreateContainer(ctx, ids[0], containerConfig("c"), nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("impatient caller: %v", err)
		}
		b.awaitCalls("create", 1)
		b.node.set(func() { delete(b.node.block, "create") })
		close(release)
		first := b.create(e, ids[0], "c")
		if second := b.create(e, ids[0], "c"); first != second {
			t.Errorf("retry got %s instead of %s", second, first)
		}
		if n := b.node.count("create"); n != 1 {
			t.Errorf("%d containers were created", n)
		}
		b.remove(e, ids[0])
		b.nothingLeft()
	})
}

// TestSameNameOtherRequest: a request that is not a retry is refused by name.
func TestSameNameOtherRequest(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	other := podConfig("a")
	other.Hostname = "else"
	if _, err := e.RunSandbox(t.Context(), "", other); !errors.Is(err, fault.Exists) {
		t.Errorf("other pod of that name: %v", err)
	}
	other.Metadata.Attempt = 1
	if _, err := e.RunSandbox(t.Context(), "", other); err != nil {
		t.Errorf("next attempt: %v", err)
	}
	id := b.start(e, pod, "c")
	if _, err := e.CreateContainer(t.Context(), pod, containerConfig("c"), nil); !errors.Is(err, fault.Exists) {
		t.Errorf("container of the name of a running one: %v", err)
	}
	if err := e.RemoveContainer(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if again := b.create(e, pod, "c"); again == id {
		t.Error("the name's new container has the old one's id")
	}
	b.removeAll(e)
}

// TestEveryStepCanFail: if any step of a create fails, with or without its effect, nothing is
// left and the name can be used at once.
func TestEveryStepCanFail(t *testing.T) {
	for _, half := range []bool{false, true} {
		for _, step := range []string{"plan", "attach"} {
			b := newBench(t)
			e := b.engine()
			b.node.fail[step], b.node.half[step] = errInjected, half
			if _, err := e.RunSandbox(t.Context(), "", podConfig("a")); !errors.Is(err, errInjected) {
				t.Errorf("%s: pod runs with %v", step, err)
			}
			b.nothingLeft()
			delete(b.node.fail, step)
			b.remove(e, b.run(e, "a"))
			b.nothingLeft()
		}
		for _, step := range []string{"mount", "probe", "create"} {
			b := newBench(t)
			e := b.engine()
			pod := b.run(e, "a")
			b.node.fail[step], b.node.half[step] = errInjected, half
			if _, err := e.CreateContainer(t.Context(), pod, containerConfig("c"), nil); !errors.Is(err, errInjected) {
				t.Errorf("%s: container is created with %v", step, err)
			}
			if n := len(e.Containers()); n != 0 {
				t.Errorf("%s: %d containers are seen", step, n)
			}
			delete(b.node.fail, step)
			b.create(e, pod, "c")
			b.remove(e, pod)
			b.nothingLeft()
		}
	}
}

// TestUndoThatFailsIsRetried: the cleanup after a failed create is retried until it
// succeeds, and holds no name meanwhile.
func TestUndoThatFailsIsRetried(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		b.node.fail["create"], b.node.half["create"] = errInjected, true
		b.node.fail["delete"] = errInjected
		if _, err := e.CreateContainer(t.Context(), pod, containerConfig("c"), nil); err == nil {
			t.Fatal("container was created")
		}
		b.node.set(func() { delete(b.node.fail, "create") })
		b.create(e, pod, "c")
		b.node.set(func() { delete(b.node.fail, "delete") })
		b.awaitCleanups(e)
		b.remove(e, pod)
		b.nothingLeft()
	})
}

// TestStartFails: the container has exited, with the reason and code of peers.
func TestStartFails(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.create(e, pod, "c")
	b.node.fail["start"] = errInjected
	if err := e.StartContainer(t.Context(), id); !errors.Is(err, errInjected) {
		t.Fatalf("start: %v", err)
	}
	v := b.waitState(e, id, cri.ContainerState_CONTAINER_EXITED)
	if v.Reason != "StartError" || v.ExitCode != 128 || v.Message == "" {
		t.Errorf("%s %d %q", v.Reason, v.ExitCode, v.Message)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// A start that fails because the container is stopped meanwhile is a precondition failure, not
// a defect of the runtime. A shim may not know the container any more, although it is still
// there.
func TestStartMeetsStop(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.create(e, pod, "c")
	stopped := make(chan struct{})
	b.node.set(func() {
		b.node.block["start"], b.node.fail["start"] = stopped, fmt.Errorf("the shim's word: %w", fault.NotFound)
	})
	started := make(chan error, 1)
	go func() { started <- e.StartContainer(context.Background(), id) }()
	b.awaitCalls("start", 1)
	if err := e.StopContainer(t.Context(), id, 0); err != nil {
		t.Error(err)
	}
	close(stopped)
	if err := <-started; !errors.Is(err, fault.Precondition) || errors.Is(err, fault.NotFound) || !strings.Contains(err.Error(), "the shim's word") {
		t.Errorf("start: %v", err)
	}
	b.waitState(e, id, cri.ContainerState_CONTAINER_EXITED)
	b.remove(e, pod)
	b.nothingLeft()
}

// A program that may run already gets the stop signal, whether or not its start has returned.
func TestStopDuringStart(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.create(e, pod, "c")
	stopped := make(chan struct{})
	b.node.set(func() { b.node.block["start"] = stopped })
	started := make(chan error, 1)
	go func() { started <- e.StartContainer(context.Background(), id) }()
	b.awaitCalls("start", 1)
	if err := e.StopContainer(t.Context(), id, time.Minute); err != nil {
		t.Error(err)
	}
	if got := b.task(id).signals; !slices.Equal(got, []unix.Signal{unix.SIGTERM}) {
		t.Errorf("signals %v", got)
	}
	close(stopped)
	<-started
	b.remove(e, pod)
	b.nothingLeft()
}

// A verb whose container exits meanwhile says so, whatever error it got.
func TestExitOvertakesVerbs(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	for step, verb := range map[string]func(id string) error{
		"exec": func(id string) error {
			_, err := e.ExecSync(context.Background(), id, []string{"true"}, 0)
			return err
		},
		"update": func(id string) error {
			return e.UpdateContainerResources(context.Background(), id, &cri.LinuxContainerResources{CpuShares: 2})
		},
	} {
		id := b.start(e, pod, step)
		goOn := make(chan struct{})
		b.node.set(func() { b.node.block[step], b.node.fail[step] = goOn, fmt.Errorf("its cgroup: %w", fault.Invalid) })
		done := make(chan error, 1)
		go func() { done <- verb(id) }()
		b.awaitCalls(step, 1)
		b.end(id, 0)
		close(goOn)
		if err := <-done; !errors.Is(err, fault.Precondition) || errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", step, err)
		}
		other := b.start(e, pod, "other "+step)
		if err := verb(other); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s of a container that lives: %v", step, err)
		}
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// TestStopShortened answers cri-o/cri-o#8748: a stop with less grace brings a running stop
// forward, one with more does not put it off.
func TestStopShortened(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.start(e, pod, "c")
	b.node.set(func() { b.node.tasks[id].stubborn = true })
	patient := make(chan error, 2)
	for range 2 {
		go func() { patient <- e.StopContainer(context.Background(), id, time.Hour) }()
	}
	b.awaitCalls("signal", 1)
	if err := e.StopContainer(t.Context(), id, 30*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-patient; err != nil {
			t.Error(err)
		}
	}
	if v, _ := e.Container(id); v.ExitCode != 137 {
		t.Errorf("exit code %d", v.ExitCode)
	}
	if got := b.task(id).signals; !slices.Equal(got, []unix.Signal{unix.SIGTERM}) {
		t.Errorf("signals %v", got)
	}
	b.remove(e, pod)
}

// cri-o/cri-o#9326: a container that cannot be killed holds up only its own caller, for
// as long as that waits.
func TestStopOfAnUnkillableContainer_crio_9326(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.start(e, pod, "c")
	b.node.set(func() { b.node.tasks[id].immortal, b.node.tasks[id].stubborn = true, true })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if err := e.StopContainer(ctx, id, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("stop: %v", err)
	}
	if v, _ := e.Container(id); v.State != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("state %s", v.State)
	}
	b.create(e, pod, "another")
	b.node.set(func() { b.node.tasks[id].die(137) })
	b.remove(e, pod)
	b.nothingLeft()
}

// TestStopPodCallsOffCreate: a creation that hangs in any step does not hold up the stop of its
// pod, reports why it ended, and leaves nothing.
func TestStopPodCallsOffCreate(t *testing.T) {
	for _, step := range []string{"find image", "admit default volume", "mount", "create"} {
		t.Run(step, func(t *testing.T) {
			b := newBench(t)
			e := b.engine()
			pod := b.run(e, "a")
			b.node.block[step] = make(chan struct{})
			created := make(chan error, 1)
			cfg := containerConfig("c")
			if strings.HasSuffix(step, " volume") { // it is not its volumes that it fails for
				cfg.Mounts = []*cri.Mount{{ContainerPath: "/v", Image: &cri.ImageSpec{Image: "image", UserSpecifiedImage: "volume"}}}
			}
			go func() {
				_, err := e.CreateContainer(context.Background(), pod, cfg, nil)
				created <- err
			}()
			b.awaitCalls(step, 1)
			if err := e.StopSandbox(t.Context(), pod); err != nil {
				t.Fatal(err)
			}
			if err := <-created; !errors.Is(err, errPodEnding) || errors.Is(err, ErrImageVolume) {
				t.Errorf("creation ended with %v", err)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}

// A stop that waits for a removal of its pod does not write the record of the removed pod
// again.
func TestStopAfterRemoveLeavesNoRecord(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	s, err := e.sandboxes.Find(pod)
	if err != nil {
		t.Fatal(err)
	}
	b.remove(e, pod)
	s.Life.Lock()
	err = s.stop(t.Context())
	s.Life.Unlock()
	if err != nil {
		t.Errorf("the late stop: %v", err)
	}
	b.nothingLeft()
}

// TestNetworkTeardownIsRetried answers cri-o/cri-o#4727: a CNI plugin that fails does not keep
// a pod from being stopped and removed, and its DEL is not forgotten.
func TestNetworkTeardownIsRetried(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		b.start(e, pod, "c")
		b.node.fail["detach"] = errInjected
		if err := e.StopSandbox(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		b.remove(e, pod)
		if n := len(e.Sandboxes()); n != 0 {
			t.Errorf("%d pods are seen", n)
		}
		second := b.run(e, "a") // the name is free
		b.node.set(func() { delete(b.node.fail, "detach") })
		b.remove(e, second)
		b.close(e)
		// A new server knows of it, from the record.
		e = b.engine()
		b.awaitCleanups(e)
		b.nothingLeft()
	})
}

// TestMonitorLost: a container without a monitor is killed, and its end is recorded.
func TestMonitorLost(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.create(e, pod, "c")
	task := b.task(id)
	b.close(e)
	close(task.lost)
	e = b.engine()
	v := b.waitState(e, id, cri.ContainerState_CONTAINER_EXITED)
	if v.ExitCode != 137 || v.Message == "" {
		t.Errorf("code %d, message %q", v.ExitCode, v.Message)
	}
	if b.node.count("kill") == 0 {
		t.Error("it was not killed")
	}
	if _, err := os.Stat(filepath.Join(b.cfg.StateDir, "containers", id, "exit.json")); err != nil {
		t.Error(err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

func TestOneServerAtATime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	lock, err := Lock(t.Context(), dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	who := fmt.Sprintf("another crius instance, process %d, which", os.Getpid())
	if _, err := Lock(t.Context(), dir, 0); !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), who) {
		t.Errorf("second server: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if lock, err = Lock(t.Context(), dir, 0); err != nil {
		t.Fatal(err)
	}
	_ = lock.Close()
}

// A server that is killed between the fork and the exec of a child leaves its lock to the child
// for a moment: the next server must not give up because of that.
func TestLockOfAServerKilledAtAFork(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	lock, err := Lock(t.Context(), dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command("cat") // until its input ends
	child.ExtraFiles = []*os.File{lock.(*os.File)}
	input, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer child.Wait()
	defer input.Close()
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(t.Context(), dir, 0); !errors.Is(err, fault.Precondition) {
		t.Fatalf("the child does not hold the lock: %v", err)
	}
	go input.Close()
	lock, err = Lock(t.Context(), dir, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	_ = lock.Close()
}

// TestRunRootTooLong: the start of the server fails, not the first pod.
func TestRunRootTooLong(t *testing.T) {
	b := newBench(t)
	b.cfg.RunDir += "/much/too/long"
	if _, err := New(b.Context(), b.cfg, Deps{}); !errors.Is(err, fault.Invalid) {
		t.Errorf("got %v", err)
	}
}

// Resources of a whole pod are reported, survive a restart, and change neither the request nor
// earlier views.
func TestUpdateSandbox(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	before, _ := e.Sandbox(pod)
	limits := &cri.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}
	if err := e.UpdateSandboxResources(b.Context(), pod, nil, limits); err != nil {
		t.Fatal(err)
	}
	if before.Config.GetLinux().GetResources() != nil {
		t.Error("an old view was modified")
	}
	b.close(e)
	e = b.engine()
	if v, _ := e.Sandbox(pod); v.Config.GetLinux().GetOverhead() != nil {
		t.Error("what was not updated is there after a restart")
	}
	overhead := &cri.LinuxContainerResources{CpuShares: 10}
	if err := e.UpdateSandboxResources(b.Context(), pod, overhead, nil); err != nil {
		t.Fatal(err)
	}
	b.close(e)
	e = b.engine()
	v, _ := e.Sandbox(pod)
	if linux := v.Config.GetLinux(); !proto.Equal(linux.GetResources(), limits) || !proto.Equal(linux.GetOverhead(), overhead) {
		t.Errorf("after a restart: %v", linux)
	}
	if err := e.UpdateSandboxResources(b.Context(), "none", nil, limits); !errors.Is(err, fault.NotFound) {
		t.Errorf("unknown pod: %v", err)
	}
	if err := e.StopSandbox(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	if err := e.UpdateSandboxResources(b.Context(), pod, nil, limits); !errors.Is(err, fault.Precondition) {
		t.Errorf("stopped pod: %v", err)
	}
	b.remove(e, pod)
}

func TestUpdate(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	cfg := containerConfig("c")
	cfg.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 100, MemoryLimitInBytes: 64 << 20,
		HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 1 << 21}}}
	id, err := e.CreateContainer(t.Context(), pod, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	before, _ := e.Container(id)
	if err := e.UpdateContainerResources(t.Context(), id, &cri.LinuxContainerResources{CpuShares: 200}); err != nil {
		t.Fatal(err)
	}
	want := proto.CloneOf(cfg.Linux.Resources)
	want.CpuShares = 200
	if v, _ := e.Container(id); !proto.Equal(v.Resources.Linux, want) {
		t.Errorf("resources %v, want %v", v.Resources.Linux, want)
	}
	if before.Resources.Linux.CpuShares != 100 || v(e, id).Config.Linux.Resources.CpuShares != 100 {
		t.Error("an old view or the request was modified")
	}
	b.node.fail["update"] = errInjected
	if err := e.UpdateContainerResources(t.Context(), id, &cri.LinuxContainerResources{CpuShares: 300}); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	if !proto.Equal(v(e, id).Resources.Linux, want) {
		t.Error("a failed update is reported as if it had happened")
	}
	b.remove(e, pod)
}

func v(e *Engine, id string) *view.Container {
	view, _ := e.Container(id)
	return view
}

// TestPullsAreShared: equal pulls are shared and outlive their callers; other credentials make
// another pull; a server that stops cancels it.
func TestPullsAreShared(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	release := make(chan struct{})
	b.node.block["pull"] = release
	req := storage.PullRequest{Image: "image", Auth: &cri.AuthConfig{Username: "me"}}
	impatient, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := e.PullImage(impatient, req); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	b.awaitCalls("pull", 1)
	results := make(chan error, 3)
	pull := func(req storage.PullRequest) {
		image, err := e.PullImage(context.Background(), req)
		if err == nil && image.ID != "image" {
			err = errors.New("another image")
		}
		results <- err
	}
	for range 2 {
		go pull(req)
	}
	other := req
	other.Auth = &cri.AuthConfig{Username: "you"}
	go pull(other)
	b.awaitCalls("pull", 2)
	close(release)
	for range 3 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	b.node.set(func() { b.node.block["pull"] = make(chan struct{}) })
	go pull(req)
	b.awaitCalls("pull", 3)
	b.close(e)
	if err := <-results; !errors.Is(err, fault.Unavailable) {
		t.Errorf("pull of a stopping server: %v", err)
	}
}

// A pod that would have no monitor is refused before anything is made.
func TestPodWithoutAMonitor(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	b.node.fail["monitor ready"] = errInjected
	if _, err := e.RunSandbox(t.Context(), "fake", podConfig("a")); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	b.nothingLeft()
}

// When the server starts, plugins learn which pods there are, so that they release what they
// hold for other pods of this root: not for those on record, and not for those of other
// runtimes.
func TestCollectNetwork(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	lost, foreign, unmarked := ids.New(e.mark), ids.New(ids.Mark("/other")), ids.Unmarked()
	b.node.set(func() {
		for _, id := range []string{lost, foreign, unmarked} {
			b.node.networks[id] = true
		}
	})
	e.CollectNetwork()
	b.awaitCalls("collect", 1)
	wait.For(t, "the lost pod's network to be collected", func() (gone bool) {
		b.node.set(func() { gone = !b.node.networks[lost] })
		return gone
	})
	b.node.set(func() {
		for _, id := range []string{pod, foreign, unmarked} {
			if !b.node.networks[id] {
				t.Errorf("the network of %s was collected", id)
			}
		}
		delete(b.node.networks, foreign)
		delete(b.node.networks, unmarked)
	})
	b.node.set(func() { b.node.block["collect"] = make(chan struct{}) })
	e.CollectNetwork()
	b.awaitCalls("collect", 2)
	b.remove(e, pod)
	b.close(e) // calls the hanging one off
	b.nothingLeft()
}

// The bytes that a container has logged count as long as the server runs, and never twice:
// Prometheus would take a smaller number for a restart of the counter.
func TestLoggedOnlyGrows(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "p")
	id := b.create(e, pod, "c")
	var last conmon.LogCount
	for step, do := range []func() error{
		func() error { return nil },
		func() error { return e.StartContainer(t.Context(), id) },
		func() error { return e.RemoveContainer(t.Context(), id) },
		func() error { return e.RemoveSandbox(t.Context(), pod) },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
		logged := e.Logged(t.Context())
		if logged.Written < last.Written || logged.Written == 0 || logged.Discarded != 2*logged.Written || logged.JournalLost != 3*logged.Written {
			t.Errorf("step %d: %+v bytes after %+v", step, logged, last)
		}
		last = logged
	}
	if again := e.Logged(t.Context()); again != last {
		t.Errorf("without containers %+v bytes became %+v", last, again)
	}
}

// The longest grace that a request can ask for does not end at once.
func TestGraceWithoutEnd(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		id := b.start(e, pod, "c")
		b.node.set(func() { b.node.tasks[id].stubborn = true })
		ctx, cancel := context.WithTimeout(t.Context(), 1000*time.Hour)
		defer cancel()
		if err := e.StopContainer(ctx, id, math.MaxInt64); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, fault.Timeout) {
			t.Errorf("stop: %v", err)
		}
		if c, _ := e.Container(id); c.State != cri.ContainerState_CONTAINER_RUNNING {
			t.Errorf("the container is %v", c.State)
		}
		b.remove(e, pod)
		b.nothingLeft()
	})
}
