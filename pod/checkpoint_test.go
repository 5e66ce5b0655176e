package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage/checkpoint"
)

// All containers are frozen before the first is dumped, and none is resumed before the last has been.
func TestPodIsCheckpointedAtOneMoment(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctrs := []string{b.start(e, pod, "c1"), b.start(e, pod, "c2"), b.start(e, pod, "c3")}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	if err := e.CheckpointSandbox(ctx, pod, b.out(), ctrs); err != nil {
		t.Fatal(err)
	}
	var calls []string
	b.node.set(func() { calls = slices.Clone(b.node.calls) })
	calls = slices.DeleteFunc(calls, func(call string) bool {
		return call != "hold" && call != "pause" && call != "dump" && call != "end dump"
	})
	want := []string{"hold", "hold", "hold", "pause", "pause", "pause", "dump", "dump", "dump", "end dump", "end dump", "end dump"}
	if len(calls) < len(want) || !slices.Equal(calls[:len(want)], want) {
		t.Errorf("the order was %q", calls)
	}
	b.emptyOut()
	b.remove(e, pod)
	b.nothingLeft()
}

// A restore finds containers by name, so a checkpoint has each name once.
func TestCheckpointOfContainersWithOneName(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	first := b.start(e, pod, "c1")
	again := containerConfig("c1")
	again.Metadata.Attempt = 1
	second, err := e.CreateContainer(t.Context(), pod, again, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.StartContainer(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	b.failed(first, e.CheckpointSandbox(ctx, pod, b.out(), []string{first, second}), fault.Precondition)
	if err := e.CheckpointSandbox(ctx, pod, b.out(), []string{second}); err != nil {
		t.Error(err)
	}
	b.emptyOut()
	b.remove(e, pod)
	b.nothingLeft()
}

// checkpointing is a checkpoint of a container that hangs in its dump.
func (b *bench) checkpointing(e *Engine, ctr string, timeout time.Duration) (ended <-chan error, goOn func()) {
	b.Helper()
	hangs := make(chan struct{})
	b.node.set(func() { b.node.block["dump"] = hangs })
	result := make(chan error, 1)
	archive := b.archive()
	go func() { result <- e.CheckpointContainer(context.Background(), ctr, archive, timeout) }()
	return result, func() {
		b.node.set(func() { delete(b.node.block, "dump") })
		close(hangs)
	}
}

// failed checks that a checkpoint has ended with an error, and has left nothing.
func (b *bench) failed(ctr string, err, want error) {
	b.Helper()
	if !errors.Is(err, want) {
		b.Errorf("it ended with %v, want %v", err, want)
	}
	if left, _ := os.ReadDir(b.out()); len(left) > 0 {
		b.Errorf("it has left %v", left)
	}
	b.runs(ctr)
}

// runs checks that no checkpoint holds the container.
func (b *bench) runs(ctr string) {
	b.Helper()
	b.node.set(func() {
		if task := b.node.tasks[ctr]; task != nil && (task.frozen || task.held) {
			b.Errorf("the container is frozen: %t; its commands are held: %t", task.frozen, task.held)
		}
	})
}

// While a container is frozen, what needs its processes is refused in a way that a kubelet repeats.
func TestCallsDuringCheckpoint(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	ended, goOn := b.checkpointing(e, ctr, 0)
	b.awaitCalls("dump", 1)
	_, err := e.ExecSync(t.Context(), ctr, []string{"true"}, 0)
	for what, err := range map[string]error{
		"exec":               err,
		"attach":             e.Attach(t.Context(), ctr, Client{}),
		"another checkpoint": e.CheckpointContainer(t.Context(), ctr, filepath.Join(b.out(), "other.tar"), 0),
	} {
		if !errors.Is(err, fault.Unavailable) {
			t.Errorf("%s: %v", what, err)
		}
	}
	goOn()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := e.ExecSync(t.Context(), ctr, []string{"true"}, 0); err != nil {
		t.Errorf("exec afterwards: %v", err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// A command whose time is up because its container was frozen is not a failed probe.
func TestProbeDuringCheckpoint(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	late := fmt.Errorf("its time is up: %w", fault.Timeout)
	endsLate := make(chan struct{})
	b.node.set(func() { b.node.block["exec"], b.node.fail["exec"] = endsLate, late })
	probed := make(chan error, 2)
	probe := func() {
		_, err := e.ExecSync(context.Background(), ctr, []string{"true"}, time.Hour)
		probed <- err
	}
	go probe()
	b.awaitCalls("exec", 1)
	ended, goOn := b.checkpointing(e, ctr, 0)
	b.awaitCalls("dump", 1)
	goOn()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	close(endsLate)
	if err := <-probed; !errors.Is(err, fault.Unavailable) || errors.Is(err, fault.Timeout) {
		t.Errorf("frozen meanwhile: %v", err)
	}
	probe()
	if err := <-probed; !errors.Is(err, fault.Timeout) {
		t.Errorf("never frozen: %v", err)
	}
	b.runs(ctr)
	b.remove(e, pod)
	b.nothingLeft()
}

// A checkpoint yields to whatever ends the container, and to its own time limit.
func TestCheckpointYields(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(b *bench, e *Engine, pod, ctr string) error
		want error
	}{
		"stop":       {func(b *bench, e *Engine, _, ctr string) error { return e.StopContainer(b.Context(), ctr, time.Minute) }, fault.Precondition},
		"kill":       {func(b *bench, e *Engine, _, ctr string) error { return e.StopContainer(b.Context(), ctr, 0) }, fault.Precondition},
		"remove":     {func(b *bench, e *Engine, _, ctr string) error { return e.RemoveContainer(b.Context(), ctr) }, fault.Precondition},
		"stop pod":   {func(b *bench, e *Engine, pod, _ string) error { return e.StopSandbox(b.Context(), pod) }, fault.Precondition},
		"remove pod": {func(b *bench, e *Engine, pod, _ string) error { return e.RemoveSandbox(b.Context(), pod) }, fault.Precondition},
		"time":       {func(*bench, *Engine, string, string) error { return nil }, fault.Timeout},
	} {
		t.Run(name, func(t *testing.T) {
			timeless(t, func(t *testing.T, b *bench) {
				e := b.engine()
				pod := b.run(e, "a")
				ctr := b.start(e, pod, "c")
				ended, _ := b.checkpointing(e, ctr, time.Minute)
				time.Sleep(time.Second) // by the clock of the test
				if err := c.end(b, e, pod, ctr); err != nil {
					t.Error(err)
				}
				b.failed(ctr, <-ended, c.want)
				b.remove(e, pod)
				b.nothingLeft()
			})
		})
	}
}

// The next server resumes a container that the last one has frozen, and removes what is unfinished, but
// not in a directory that only has the same name.
func TestRecoveryEndsCheckpoints(t *testing.T) {
	for name, c := range map[string]struct {
		swapped bool
		record  func(*records.Checkpoint)
		kept    bool
	}{
		"unfinished":            {},
		"another directory":     {swapped: true, kept: true},
		"another file system":   {record: func(c *records.Checkpoint) { c.Device++ }, kept: true},
		"of an earlier version": {record: func(c *records.Checkpoint) { c.Device = 0 }},
	} {
		t.Run(name, func(t *testing.T) { recoverCheckpoint(t, c.swapped, c.kept, c.record) })
	}
}

// recoverCheckpoint has a server die in a checkpoint, with that change of what it recorded, and another
// one recover it.
func recoverCheckpoint(t *testing.T, swapped, kept bool, change func(*records.Checkpoint)) {
	t.Helper()
	b := newBench(t)
	first := b.engine()
	pod := b.run(first, "a")
	ctr := b.start(first, pod, "c")
	c, err := first.containers.Find(ctr)
	if err != nil {
		t.Fatal(err)
	}
	target, err := checkpoint.OpenTarget(b.out())
	if err != nil {
		t.Fatal(err)
	}
	s := &snapshot{target: target, dir: b.out(), members: []*member{{Container: c, part: target.PartIn("part"), unfinished: []string{"part", "other"}}}}
	c.dump.Store(&dumping{cancel: func(error) {}})
	if err := errors.Join(s.record(t.Context()), s.capture(t.Context())); err != nil {
		t.Fatal(err)
	}
	b.task(ctr).set(func() { b.node.tasks[ctr].frozen = true }) // as if it had not come to resuming
	if change != nil {
		c.Change(func(now *liveContainer) { change(now.Checkpoint) })
		if err := errors.Join(c.Put(t.Context()), c.Sync()); err != nil {
			t.Fatal(err)
		}
	}
	if swapped {
		if err := errors.Join(os.Rename(b.out(), b.out()+"-moved"), os.MkdirAll(filepath.Join(b.out(), "part", "mine"), 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	b.close(first)
	second := b.engine()
	b.awaitCleanups(second)
	if c, err := second.containers.Find(ctr); err != nil || c.Now().Checkpoint != nil {
		t.Errorf("on record is %+v, %v", c.Now().Checkpoint, err)
	}
	if b.task(ctr).frozen {
		t.Error("the container is frozen")
	}
	left, err := os.ReadDir(b.out())
	if err != nil || (len(left) > 0) != kept {
		t.Errorf("there is %v, %v", left, err)
	}
	target.Close()
	if err := errors.Join(os.RemoveAll(b.out()), os.RemoveAll(b.out()+"-moved")); err != nil {
		t.Error(err)
	}
	b.remove(second, pod)
	b.nothingLeft()
}

// When the time is up while a runtime is asked what it can, that is the error, and not that it cannot: kubelets take
// that for a property of the node.
func TestTimeIsUpWhileRuntimeIsAsked(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	c, err := e.containers.Find(ctr)
	if err != nil {
		t.Fatal(err)
	}
	b.node.set(func() { b.node.cannotDump = fault.Unimplemented })
	if err := c.mayCheckpoint(t.Context()); !errors.Is(err, fault.Unimplemented) {
		t.Errorf("in time: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(fault.Timeout)
	if err := c.mayCheckpoint(ctx); !errors.Is(err, fault.Timeout) || errors.Is(err, fault.Unimplemented) {
		t.Errorf("too late: %v", err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}
