package pod

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/test/kit/wait"
)

func (b *bench) listen(e *Engine) *view.Listener {
	b.Helper()
	l, err := e.Listen()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(l.Close)
	return l
}

// end ends a container's program.
func (b *bench) end(ctr string, code int32) {
	task := b.task(ctr)
	b.node.set(func() { task.die(code) })
}

// tale returns the events that a listener gets until the pod is gone, in words, with names
// instead of ids.
func (b *bench) tale(l *view.Listener, names map[string]string, last string) string {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), wait.Limit)
	defer cancel()
	var words []string
	for len(words) == 0 || words[len(words)-1] != last {
		event, err := l.Next(ctx)
		if err != nil {
			b.Fatalf("after %q: %v", words, err)
		}
		kind := strings.ToLower(strings.Split(event.Type.String(), "_")[1])
		words = append(words, names[event.ID]+" "+kind)
		if event.Sandbox == nil || event.At.IsZero() {
			b.Errorf("%s: %+v", words[len(words)-1], event)
		}
		for _, c := range event.Containers {
			if names[c.ID] == "" || c.SandboxID != event.Sandbox.ID {
				b.Errorf("%s: container %s of another pod", words[len(words)-1], c.ID)
			}
		}
	}
	return strings.Join(words, ", ")
}

func TestEventsOfALife(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	l := b.listen(e)
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	b.end(ctr, 0)
	names := map[string]string{pod: "pod", ctr: "ctr"}
	// Readers see the end before listeners hear of it.
	if got, want := b.tale(l, names, "ctr stopped"), "pod created, pod started, ctr created, ctr started, ctr stopped"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	never := b.create(e, pod, "never")
	names[never] = "never"
	b.remove(e, pod)
	got := b.tale(l, names, "pod deleted")
	for _, want := range []string{"never created, never stopped, ", "never deleted", "ctr deleted", ", pod deleted"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
}

// A container that ends before its start has returned, and a container that cannot be started
// at all.
func TestEventsOfShortLives(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	l := b.listen(e)
	short := b.create(e, pod, "short")
	returns := make(chan struct{})
	b.node.set(func() { b.node.block["start"] = returns })
	done := make(chan error, 1)
	go func() { done <- e.StartContainer(context.Background(), short) }()
	b.awaitCalls("start", 1)
	b.end(short, 3)
	b.waitState(e, short, cri.ContainerState_CONTAINER_EXITED)
	b.node.set(func() { delete(b.node.block, "start") })
	close(returns)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	names := map[string]string{short: "short"}
	if got := b.tale(l, names, "short stopped"); got != "short created, short started, short stopped" {
		t.Error(got)
	}
	// A container that is dead when its start turns out to have failed.
	gone := b.create(e, pod, "gone")
	names[gone] = "gone"
	hangs := make(chan struct{})
	b.node.set(func() { b.node.block["start"], b.node.fail["start"] = hangs, errInjected })
	go func() { done <- e.StartContainer(context.Background(), gone) }()
	b.awaitCalls("start", 2)
	b.end(gone, 3)
	b.waitState(e, gone, cri.ContainerState_CONTAINER_EXITED)
	b.node.set(func() { delete(b.node.block, "start") })
	close(hangs)
	if err := <-done; !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	if v, _ := e.Container(gone); v.ExitCode != records.StartErrorCode || v.Reason != "StartError" {
		t.Errorf("a start that failed: %d %s", v.ExitCode, v.Reason)
	}
	if got := b.tale(l, names, "gone stopped"); got != "gone created, gone stopped" {
		t.Error(got)
	}
	failing := b.create(e, pod, "failing")
	names[failing] = "failing"
	b.node.set(func() { b.node.fail["start"] = errInjected })
	if err := e.StartContainer(t.Context(), failing); !errors.Is(err, errInjected) {
		t.Fatal(err)
	}
	b.node.set(func() { delete(b.node.fail, "start") })
	if got := b.tale(l, names, "failing stopped"); got != "failing created, failing stopped" {
		t.Error(got)
	}
	b.remove(e, pod)
}

// A restart repeats no event.
func TestEventsAfterRestart(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	b.close(e)
	e = b.engine()
	l := b.listen(e)
	b.end(ctr, 0)
	if got := b.tale(l, map[string]string{pod: "pod", ctr: "ctr"}, "ctr stopped"); got != "ctr stopped" {
		t.Error(got)
	}
	b.remove(e, pod)
}

// A server that stops ends its listeners.
func TestStopEvents(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	l := b.listen(e)
	done := make(chan error, 1)
	go func() { _, err := l.Next(context.Background()); done <- err }()
	e.StopEvents()
	if err := <-done; !errors.Is(err, fault.Unavailable) {
		t.Errorf("a stopping server: %v", err)
	}
	if _, err := e.Listen(); !errors.Is(err, fault.Unavailable) {
		t.Errorf("a stopped server: %v", err)
	}
}

// The end of a job is not reported before its records are on the disk: after a power cut, the
// kubelet would run the job again although it had seen the end.
func TestExitIsReportedOnceItsRecordsAreSynced(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	for _, again := range []error{e.records.Pods.Put(t.Context(), pod, mustGet(t, e.records.Pods, pod)), e.records.Containers.Put(t.Context(), ctr, mustGet(t, e.records.Containers, ctr))} {
		if again != nil { // so that there is something to sync
			t.Fatal(again)
		}
	}
	b.end(ctr, 0)
	b.waitState(e, ctr, cri.ContainerState_CONTAINER_EXITED)
	for _, dir := range []string{e.records.Pods.Path(pod), e.records.Containers.Path(ctr)} {
		if unsynced, _ := filepath.Glob(filepath.Join(dir, "*.last")); len(unsynced) > 0 {
			t.Errorf("the end was told while %q were kept for records that are not on the disk", unsynced)
		}
	}
	b.remove(e, pod)
}

func mustGet[T any](t *testing.T, from *record.Dir[T], id string) *T {
	t.Helper()
	doc, err := from.Get(id)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}
