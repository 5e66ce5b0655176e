package pod

import (
	"testing"
	"time"

	"github.com/crius-run/crius/pod/usage"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/storage"
)

// Stats do not wait for a verb that hangs with the locks of a pod and its container.
func TestStatsWaitForNobody(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.create(e, pod, "c")
	layer := storage.FsUsage{UsedBytes: 4096, InodesUsed: 1, Timestamp: time.Now()}
	b.node.set(func() { b.node.layers = map[string]storage.FsUsage{id: layer} })
	s, _ := e.sandboxes.Find(pod)
	c, _ := e.containers.Find(id)
	s.Life.Lock()
	c.Life.Lock()
	told := make(chan *usage.SandboxStats, 1)
	go func() {
		all := e.Usage().SandboxStats(t.Context(), func(v *view.Sandbox) bool { return v.ID == pod })
		if len(all) != 1 {
			all = []*usage.SandboxStats{{}}
		}
		told <- all[0]
	}()
	stats := <-told // never arrives if it waits for a lock
	if stats.View == nil || stats.View.ID != pod || len(stats.Containers) != 1 || stats.Containers[0].View.ID != id {
		t.Fatalf("stats are %+v", stats)
	}
	if got := stats.Containers[0].Layer; got == nil || *got != layer {
		t.Errorf("writable layer is %+v", got)
	}
	c.Life.Unlock()
	s.Life.Unlock()
	if all := e.Usage().ContainerStats(t.Context(), func(v *view.Container) bool { return v.SandboxID != pod }); len(all) != 0 {
		t.Errorf("stats of %d containers that nobody wanted", len(all))
	}
	b.remove(e, pod)
	b.nothingLeft()
}
