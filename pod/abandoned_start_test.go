package pod

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// giveUp starts a container for a caller that stops waiting.
func (b *bench) giveUp(e *Engine, id string) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
	defer cancel()
	if err := e.StartContainer(ctx, id); !errors.Is(err, context.DeadlineExceeded) {
		b.Fatalf("start: %v", err)
	}
}

// leave starts a container for a caller that does not wait at all.
func (b *bench) leave(e *Engine, id string) {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	cancel()
	if err := e.StartContainer(ctx, id); !errors.Is(err, context.Canceled) {
		b.Fatalf("start: %v", err)
	}
}

// wantState checks the state that readers see. What runs has been started.
func (b *bench) wantState(e *Engine, when, id string, want cri.ContainerState) {
	b.Helper()
	v, err := e.Container(id)
	if err != nil || v.State != want || want == cri.ContainerState_CONTAINER_RUNNING && (v.StartedAt.IsZero() || v.PID == 0) {
		b.Errorf("%s: %s since %v with process %d, want %s; %v", when, v.State, v.StartedAt, v.PID, want, err)
	}
}

// awaitStart returns when no start of the container is under way.
func (b *bench) awaitStart(e *Engine, id string) {
	b.Helper()
	wait.For(b, "the end of the start", func() bool {
		c, err := e.containers.Find(id)
		return err == nil && c.Now().abandoned == nil
	})
}

// A kubelet that gives up a start finds the container running, and does not have another attempt
// started beside it. When the start ends, the container is what it has become.
func TestStartThatItsCallerGivesUp_kubernetes_139670_kubernetes_122585(t *testing.T) {
	for _, fails := range []error{nil, errInjected} {
		timeless(t, func(t *testing.T, b *bench) {
			e := b.engine()
			pod := b.run(e, "a")
			id := b.create(e, pod, "c")
			l, names := b.listen(e), map[string]string{pod: "pod", id: "ctr"}
			release := make(chan struct{})
			b.node.set(func() { b.node.block["start"], b.node.fail["start"] = release, fails })
			b.giveUp(e, id)
			b.wantState(e, "while it is started", id, cri.ContainerState_CONTAINER_RUNNING)
			if got := b.tale(l, names, "ctr started"); got != "ctr started" {
				t.Errorf("while it is started: %q", got)
			}
			if _, err := e.ExecSync(t.Context(), id, []string{"true"}, 0); !errors.Is(err, fault.Unavailable) {
				t.Errorf("a probe while it is started: %v", err)
			}
			if err := e.CheckpointContainer(t.Context(), id, b.archive(), time.Minute); !errors.Is(err, fault.Unavailable) {
				t.Errorf("a checkpoint while it is started: %v", err)
			}
			close(release)
			b.awaitStart(e, id)
			want := cri.ContainerState_CONTAINER_RUNNING
			if fails != nil {
				want = cri.ContainerState_CONTAINER_EXITED
			} else if _, err := e.ExecSync(t.Context(), id, []string{"true"}, 0); err != nil {
				t.Errorf("exec afterwards: %v", err)
			}
			b.wantState(e, "afterwards", id, want)
			b.remove(e, pod)
			if got := b.tale(l, names, "pod deleted"); strings.Contains(got, "started") || strings.Count(got, "ctr stopped") != 1 {
				t.Errorf("afterwards: %q", got)
			}
			b.nothingLeft()
		})
	}
}

// A caller that gives up while another verb still holds the container has asked for the start, too.
func TestStartThatItsCallerGivesUpBeforeItBegins(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.create(e, pod, "c")
	release := make(chan struct{})
	b.node.set(func() { b.node.block["update"] = release })
	updated := make(chan error, 1)
	go func() {
		updated <- e.UpdateContainerResources(b.Context(), id, &cri.LinuxContainerResources{CpuShares: 512})
	}()
	b.awaitCalls("update", 1)
	for range 2 {
		b.leave(e, id)
		b.wantState(e, "before it begins", id, cri.ContainerState_CONTAINER_RUNNING)
	}
	if c, err := e.containers.Find(id); err != nil || c.describe().State != cri.ContainerState_CONTAINER_CREATED {
		t.Errorf("what plugins see is not created: %v", err)
	}
	close(release)
	if err := <-updated; err != nil {
		t.Error(err)
	}
	b.awaitStart(e, id)
	b.wantState(e, "afterwards", id, cri.ContainerState_CONTAINER_RUNNING)
	if n := b.node.count("start"); n != 1 {
		t.Errorf("%d starts", n)
	}
	if err := e.StartContainer(t.Context(), id); !errors.Is(err, fault.Precondition) {
		t.Errorf("another start: %v", err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// A start that is refused leaves a container that can be started.
func TestAbandonedStartThatIsRefused(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.create(e, pod, "c")
	s, err := e.sandboxes.Find(pod)
	if err != nil {
		t.Fatal(err)
	}
	c, err := e.containers.Find(id)
	if err != nil {
		t.Fatal(err)
	}
	s.Change(func(now *livePod) { now.Restoring = true })
	c.Life.Lock()
	b.leave(e, id)
	b.wantState(e, "before it is refused", id, cri.ContainerState_CONTAINER_RUNNING)
	c.Life.Unlock()
	b.awaitStart(e, id)
	b.waitState(e, id, cri.ContainerState_CONTAINER_CREATED)
	s.Change(func(now *livePod) { now.Restoring = false })
	if err := e.StartContainer(t.Context(), id); err != nil {
		t.Error(err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// A container whose start has failed and that cannot be killed may run, and is not shown as one
// that nobody has started.
func TestFailedStartThatCannotBeUndone(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		id := b.create(e, pod, "c")
		release := make(chan struct{})
		b.node.set(func() { b.node.fail["start"], b.node.block["kill"] = errInjected, release })
		if err := e.StartContainer(t.Context(), id); !errors.Is(err, errInjected) {
			t.Errorf("start: %v", err)
		}
		b.wantState(e, "while it cannot be killed", id, cri.ContainerState_CONTAINER_RUNNING)
		if err := e.StartContainer(t.Context(), id); !errors.Is(err, fault.Precondition) {
			t.Errorf("another start: %v", err)
		}
		close(release)
		b.waitState(e, id, cri.ContainerState_CONTAINER_EXITED)
		b.remove(e, pod)
		b.nothingLeft()
	})
}
