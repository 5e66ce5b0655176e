package integration

import (
	"context"
	"slices"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/test/kit/wait"
)

// events collects the server's events until the stream ends.
type events struct {
	got  chan *cri.ContainerEventResponse
	done chan error
}

func (w *world) listen(t *testing.T) *events {
	t.Helper()
	stream, err := w.Runtime().GetContainerEvents(context.Background(), &cri.GetEventsRequest{})
	if err == nil {
		_, err = stream.Header() // from now on
	}
	if err != nil {
		t.Fatal(err)
	}
	e := &events{got: make(chan *cri.ContainerEventResponse, 10000), done: make(chan error, 1)}
	go func() {
		for {
			event, err := stream.Recv()
			if err != nil {
				e.done <- err
				return
			}
			e.got <- event
		}
	}()
	return e
}

// until collects the events up to one about id.
func (e *events) until(t *testing.T, id string, kind cri.ContainerEventType) (all []*cri.ContainerEventResponse) {
	t.Helper()
	if !wait.Until(t.Context(), func() bool {
		for {
			select {
			case event := <-e.got:
				all = append(all, event)
				if event.ContainerId == id && event.ContainerEventType == kind {
					return true
				}
			default:
				return false
			}
		}
	}) {
		t.Fatalf("no %v of %s after %v", kind, id, all)
	}
	return all
}

// Short-lived containers are where other runtimes send events out of order: the
// end is seen before the start has returned.
func TestEventsTellEveryLifeInOrder(t *testing.T) {
	t.Parallel()
	w := shared(t)
	e := w.listen(t)
	p := w.run(t, "crun")
	for range 8 {
		p.start(t, "exit 7").wait(t)
	}
	p.stop(t)
	p.remove(t)
	lives := map[string][]cri.ContainerEventType{}
	last := int64(0)
	for _, event := range e.until(t, p.id, cri.ContainerEventType_CONTAINER_DELETED_EVENT) {
		id := event.ContainerId
		if !contains(p.made, id) { // of another test
			continue
		}
		lives[id] = append(lives[id], event.ContainerEventType)
		equal(t, "pod of an event", event.PodSandboxStatus.GetId(), p.id)
		if event.CreatedAt < last {
			t.Error("an event is older than the one before")
		}
		last = event.CreatedAt
		if event.ContainerEventType != cri.ContainerEventType_CONTAINER_STOPPED_EVENT || id == p.id {
			continue
		}
		i := slices.IndexFunc(event.ContainersStatuses, func(s *cri.ContainerStatus) bool { return s.Id == id })
		if i < 0 || event.ContainersStatuses[i].ExitCode != 7 || event.ContainersStatuses[i].FinishedAt == 0 {
			t.Errorf("the end of %s comes with %v", id, event.ContainersStatuses)
		}
	}
	equal(t, "objects with events", len(lives), len(p.made))
	for id, life := range lives {
		if !slices.Equal(life, []cri.ContainerEventType{0, 1, 2, 3}) {
			t.Errorf("%s: %v", id, life)
		}
	}
}

// The status that a kubelet with evented PLEG uses instead of a list.
func TestStatusOfAPodHasItsContainers(t *testing.T) {
	t.Parallel()
	w := shared(t)
	p := w.run(t, "runc")
	c := p.start(t, "sleep")
	done := p.start(t, "exit 3")
	done.wait(t)
	before := time.Now()
	resp, err := w.Runtime().PodSandboxStatus(t.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: p.id})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "containers", len(resp.ContainersStatuses), 2)
	equal(t, "newest", resp.ContainersStatuses[0].Id, done.id)
	equal(t, "its code", resp.ContainersStatuses[0].ExitCode, 3)
	equal(t, "oldest", resp.ContainersStatuses[1].Id, c.id)
	if resp.Timestamp < before.UnixNano() || resp.Timestamp > time.Now().UnixNano() {
		t.Errorf("timestamp %d", resp.Timestamp)
	}
}
