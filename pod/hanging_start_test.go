package pod

import (
	"errors"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/pod/blueprint"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/test/kit/wait"
)

// Monitors that do not answer do not hold up the start. Their containers, and the pods whose
// infra containers they watch, are neither dead nor lost; the server reports the monitors as
// unreachable; and once they answer, everything is known correctly.
func TestStartWhileMonitorsHang(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		b.zoo(e)
		dying, killed := b.start(e, b.run(e, "b"), "dying"), b.start(e, b.run(e, "c"), "killed")
		before, kills := views(e), b.node.count("kill")
		b.close(e)
		hang := make(chan struct{})
		b.node.set(func() { b.node.block["load"] = hang })
		e = b.engine()
		if after := views(e); len(after) != len(before) {
			t.Errorf("%d pods and containers of %d", len(after), len(before))
		}
		for _, pod := range e.Sandboxes() {
			if want := before["pod "+pod.ID].(view.Sandbox); pod.State != want.State || pod.PID != want.PID {
				t.Errorf("pod %s is %s with process %d, want %s, %d", pod.Config.Metadata.Name, pod.State, pod.PID, want.State, want.PID)
			}
		}
		unreachable := 1 // of the infra container
		for _, c := range e.Containers() {
			want := before["container "+c.ID].(view.Container)
			if c.State != want.State {
				t.Errorf("container %s is %s, want %s", c.Config.Metadata.Name, c.State, want.State)
			}
			if c.State != cri.ContainerState_CONTAINER_EXITED { // as is on record, and need not be asked for
				unreachable++
			}
		}
		if s := e.Summary(); s.Unreachable != unreachable || s.MonitorsLost != 0 {
			t.Errorf("%d monitors have not answered, want %d; %d are lost", s.Unreachable, unreachable, s.MonitorsLost)
		}
		if b.node.count("kill") != kills {
			t.Error("a container was killed because its monitor hangs")
		}
		created := findState(e, cri.ContainerState_CONTAINER_CREATED)
		if err := e.StartContainer(t.Context(), created); !errors.Is(err, fault.Unavailable) {
			t.Errorf("start of a container whose monitor hangs: %v", err)
		}
		b.node.set(func() { b.node.tasks[dying].die(7) })
		stopped := make(chan error, 1)
		go func() { stopped <- e.StopContainer(t.Context(), killed, 0) }()
		b.awaitCalls("kill", kills+1)
		close(hang)
		if err := <-stopped; err != nil {
			t.Errorf("stop of a container whose monitor hung: %v", err)
		}
		wait.For(t, "every monitor to answer", func() bool { return e.Summary().Unreachable == 0 })
		if v := b.waitState(e, dying, cri.ContainerState_CONTAINER_EXITED); v.ExitCode != 7 {
			t.Errorf("exit code %d", v.ExitCode)
		}
		if err := e.StartContainer(t.Context(), created); err != nil {
			t.Error(err)
		}
		b.removeAll(e)
	})
}

func findState(e *Engine, state cri.ContainerState) string {
	for _, c := range e.Containers() {
		if c.State == state {
			return c.ID
		}
	}
	return ""
}

// A monitor that cannot be reached now, for example because descriptors are used up, is asked
// again.
func TestStartWhileMonitorsCannotBeReached(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		ctr := b.start(e, pod, "c")
		b.close(e)
		b.node.set(func() { b.node.fail["load"] = errInjected })
		e = b.engine()
		if v := v(e, ctr); v.State != cri.ContainerState_CONTAINER_RUNNING || e.Summary().Unreachable != 1 {
			t.Errorf("%+v, %d monitors unreachable", v, e.Summary().Unreachable)
		}
		b.node.set(func() { delete(b.node.fail, "load") })
		wait.For(t, "every monitor to answer", func() bool { return e.Summary().Unreachable == 0 })
		b.remove(e, pod)
		b.nothingLeft()
	})
}

// Teardown that does not finish during the start is finished afterwards.
func TestStartWhileEndsHang(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod, dead := b.run(e, "a"), b.run(e, "dead")
		lost, unfinished := b.start(e, pod, "lost"), b.create(e, pod, "unfinished")
		b.close(e)
		close(b.task(lost).lost)
		rewrite(t, e.records.Containers, unfinished, func(r *records.Container) { r.Phase = records.Creating })
		if err := ns.Remove(ns.Spec{Dir: b.cfg.NamespacesDir, Name: blueprint.PinPrefix + dead}); err != nil {
			t.Fatal(err)
		}
		hang := make(chan struct{})
		b.node.set(func() {
			for _, step := range []string{"kill", "delete", "detach"} {
				b.node.block[step] = hang
			}
		})
		e = b.engine()
		if v, err := e.Sandbox(dead); err != nil || v.State != cri.PodSandboxState_SANDBOX_NOTREADY {
			t.Errorf("the dead pod: %+v, %v", v, err)
		}
		if _, err := e.Container(unfinished); !errors.Is(err, fault.NotFound) {
			t.Errorf("the unfinished container: %v", err)
		}
		if e.cleanups.Len() != 2 { // of the dead pod, and of the unfinished container
			t.Errorf("%d pending cleanups", e.cleanups.Len())
		}
		close(hang)
		if v := b.waitState(e, lost, cri.ContainerState_CONTAINER_EXITED); v.ExitCode != codeKilled || !strings.Contains(v.Message, "lost") {
			t.Errorf("the lost container: %+v", v)
		}
		b.awaitCleanups(e)
		b.removeAll(e)
	})
}

// A start that an earlier server began, and that hangs, leaves the container running as far as
// is known: its program may begin at any moment, beside that of another attempt. It can be stopped,
// and nothing else.
func TestStartOfAnEarlierServerHangs(t *testing.T) {
	for _, ends := range []bool{false, true} {
		timeless(t, func(t *testing.T, b *bench) {
			e := b.engine()
			pod := b.run(e, "a")
			ctr := b.create(e, pod, "c")
			b.close(e)
			at := time.Now().Add(-time.Minute).UTC()
			rewrite(t, e.records.Containers, ctr, func(r *records.Container) { r.Phase, r.StartedAt = records.Starting, at })
			b.node.set(func() { b.node.fail["state"] = fault.Timeout })
			e = b.engine()
			if v := v(e, ctr); v.State != cri.ContainerState_CONTAINER_RUNNING || !v.StartedAt.Equal(at) {
				t.Errorf("state %s since %s", v.State, v.StartedAt)
			}
			if _, err := e.ExecSync(t.Context(), ctr, []string{"true"}, 0); !errors.Is(err, fault.Unavailable) {
				t.Errorf("exec: %v", err)
			}
			if err := e.StartContainer(t.Context(), ctr); !errors.Is(err, fault.Unavailable) {
				t.Errorf("another start: %v", err)
			}
			want := cri.ContainerState_CONTAINER_EXITED
			if ends {
				want = cri.ContainerState_CONTAINER_RUNNING
				b.node.set(func() { b.node.tasks[ctr].started = true; delete(b.node.fail, "state") })
			} else if err := e.StopContainer(t.Context(), ctr, time.Minute); err != nil {
				t.Errorf("stop: %v", err)
			}
			wait.For(t, "the start to end", func() bool { return e.containers.All()[0].Now().Phase != records.Starting || !ends })
			if v := b.waitState(e, ctr, want); ends && !v.StartedAt.Equal(at) {
				t.Errorf("it runs since %s", v.StartedAt)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}
