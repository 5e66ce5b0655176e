package pod

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/oci"
)

// refuses makes the runtime refuse to create containers from now on.
func (b *bench) refuses(err error) {
	b.node.set(func() { b.node.fail["create"] = err })
}

var errProgram = &oci.ProgramError{Message: `exec: "/nope": no such file or directory`}

// wantStartError fails the test unless a container has exited because its program cannot be
// run.
func (b *bench) wantStartError(e *Engine, id string) {
	b.Helper()
	v := b.waitState(e, id, cri.ContainerState_CONTAINER_EXITED)
	if v.Reason != "StartError" || v.ExitCode != 128 || v.Message != errProgram.Message || !v.StartedAt.IsZero() || v.FinishedAt.IsZero() || v.PID != 0 {
		b.Errorf("it has exited with %s %d %q, started %v, finished %v, pid %d", v.Reason, v.ExitCode, v.Message, v.StartedAt, v.FinishedAt, v.PID)
	}
}

// A container whose program the runtime cannot run is created, and its start fails: a kubelet
// retries failed creations forever.
func TestProgramThatCannotBeRun(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	l, err := e.Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b.refuses(errProgram)
	id := b.create(e, pod, "c")
	if again := b.create(e, pod, "c"); again != id {
		t.Errorf("the retry made %s beside %s", again, id)
	}
	if n := b.node.count("delete"); n != 1 {
		t.Errorf("the runtime was asked %d times to delete it", n)
	}
	if left := b.node.left(); !slices.Equal(left, []string{"network " + pod, "rootfs " + id}) {
		t.Errorf("on the machine: %v", left)
	}
	v, err := e.Container(id)
	if err != nil || v.State != cri.ContainerState_CONTAINER_CREATED || v.Reason != "" || v.Message != "" || v.PID != 0 {
		t.Errorf("before its start: %+v, %v", v, err)
	}
	if all, err := e.SandboxContainers(pod); err != nil || len(all) != 1 {
		t.Errorf("the pod has %v, %v", all, err)
	}
	if s := e.Summary(); s.Monitors != 0 {
		t.Errorf("%d monitors", s.Monitors)
	}
	if err := e.UpdateContainerResources(t.Context(), id, &cri.LinuxContainerResources{CpuShares: 2}); !errors.Is(err, fault.Precondition) {
		t.Errorf("update: %v", err)
	}
	if found, err := e.audit.Verify(t.Context(), false); err != nil || len(found) != 0 {
		t.Errorf("check: %v, %v", found, err)
	}

	if err := e.StartContainer(t.Context(), id); !errors.Is(err, fault.Precondition) || !strings.HasSuffix(err.Error(), errProgram.Message) {
		t.Errorf("start: %v", err)
	}
	b.wantStartError(e, id)
	if err := e.StartContainer(t.Context(), id); !errors.Is(err, fault.Precondition) {
		t.Errorf("second start: %v", err)
	}
	if err := e.RemoveContainer(t.Context(), id); err != nil {
		t.Error(err)
	}
	if got := b.tale(l, map[string]string{id: "c"}, "c deleted"); got != "c created, c stopped, c deleted" {
		t.Error(got)
	}

	// Other errors are the node's, and fail the creation.
	b.refuses(errInjected)
	if _, err := e.CreateContainer(t.Context(), pod, containerConfig("d"), nil); !errors.Is(err, errInjected) {
		t.Errorf("create: %v", err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// Such a container may be stopped or removed as any other that was never started.
func TestUnstartableEndsWithoutAStart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	b.refuses(errProgram)
	stopped, removed := b.create(e, pod, "stopped"), b.create(e, pod, "removed")
	b.create(e, pod, "left")
	if err := e.StopContainer(t.Context(), stopped, time.Hour); err != nil {
		t.Error(err)
	}
	b.wantStartError(e, stopped)
	if err := e.RemoveContainer(t.Context(), removed); err != nil {
		t.Error(err)
	}
	if _, err := e.Container(removed); !errors.Is(err, fault.NotFound) {
		t.Errorf("removed: %v", err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// TestUnstartableSurvivesRestart: before its start and after it, and a reboot.
func TestUnstartableSurvivesRestart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	b.refuses(errProgram)
	fails, waits := b.create(e, pod, "fails"), b.create(e, pod, "waits")
	for range 2 {
		b.close(e)
		e = b.engine()
	}
	if found, err := e.audit.Verify(t.Context(), false); err != nil || len(found) != 0 {
		t.Errorf("check: %v, %v", found, err)
	}
	if again := b.create(e, pod, "fails"); again != fails {
		t.Errorf("the retry made %s beside %s", again, fails)
	}
	if err := e.StartContainer(t.Context(), fails); !errors.Is(err, fault.Precondition) || !strings.HasSuffix(err.Error(), errProgram.Message) {
		t.Errorf("start: %v", err)
	}
	b.wantStartError(e, fails)
	b.close(e)
	e = b.engine()
	b.wantStartError(e, fails)
	if v, err := e.Container(waits); err != nil || v.State != cri.ContainerState_CONTAINER_CREATED {
		t.Errorf("the other: %+v, %v", v, err)
	}
	if s := e.Summary(); s.MonitorsLost != 0 || s.Unreachable != 0 {
		t.Errorf("%d monitors lost, %d not heard", s.MonitorsLost, s.Unreachable)
	}
	b.close(e)
	b.boot = "another"
	e = b.engine()
	b.wantStartError(e, waits)
	b.remove(e, pod)
	b.nothingLeft()
}

// If the runtime does not delete what it made of such a container, the creation fails, and the
// cleanup is retried.
func TestUnstartableThatCannotBeDeleted(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		b.refuses(errProgram)
		b.node.set(func() { b.node.fail["delete"] = errInjected })
		if _, err := e.CreateContainer(t.Context(), pod, containerConfig("c"), nil); err == nil {
			t.Fatal("container was created")
		}
		b.node.set(func() { delete(b.node.fail, "delete") })
		b.awaitCleanups(e)
		if err := e.StartContainer(t.Context(), b.create(e, pod, "c")); !errors.Is(err, fault.Precondition) {
			t.Errorf("start: %v", err)
		}
		b.remove(e, pod)
		b.nothingLeft()
	})
}
