package pod

import (
	"errors"
	"sync/atomic"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
)

// A start whose intention cannot be recorded does not happen, and can be retried. A start that
// has happened and cannot be recorded counts; recording it is retried.
func TestStartThatCannotBeRecorded(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		var writes, failing atomic.Int32
		b.hook = func(at trace.Point) error {
			if at.Step != "write record" || at.After || at.Operation != "start" && at.Operation != "clean up" {
				return nil
			}
			if writes.Add(1) == failing.Load() || failing.Load() < 0 {
				return errInjected
			}
			return nil
		}
		e := b.engine()
		pod := b.run(e, "a")
		ctr := b.create(e, pod, "c")
		failing.Store(1)
		if err := e.StartContainer(t.Context(), ctr); !errors.Is(err, errInjected) {
			t.Errorf("the intention could not be written: %v", err)
		}
		if v := v(e, ctr); v.State != cri.ContainerState_CONTAINER_CREATED || !v.StartedAt.IsZero() || b.node.count("start") != 0 {
			t.Errorf("state %s since %s after %d starts", v.State, v.StartedAt, b.node.count("start"))
		}
		writes.Store(0)
		failing.Store(2)
		if err := e.StartContainer(t.Context(), ctr); err != nil {
			t.Errorf("the start was not written: %v", err)
		}
		failing.Store(-1)
		if v := v(e, ctr); v.State != cri.ContainerState_CONTAINER_RUNNING || v.StartedAt.IsZero() || e.cleanups.Len() != 1 {
			t.Errorf("state %s since %s, %d pending cleanups", v.State, v.StartedAt, e.cleanups.Len())
		}
		record := func() *records.Container {
			rec, err := e.records.Containers.Get(ctr)
			if err != nil {
				t.Fatal(err)
			}
			return rec
		}
		if rec := record(); rec.Phase != records.Starting || rec.StartedAt.IsZero() {
			t.Errorf("on record it is %s since %s", rec.Phase, rec.StartedAt)
		}
		failing.Store(0)
		b.awaitCleanups(e)
		if rec := record(); rec.Phase != records.Started {
			t.Errorf("on record it is %s", rec.Phase)
		}
		b.remove(e, pod)
		b.nothingLeft()
	})
}
