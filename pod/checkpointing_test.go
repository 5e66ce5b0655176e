package pod

import (
	"errors"
	"os"
	"testing"
)

// A checkpoint under way is listed with its name, and what it has cost is counted whether or not it
// succeeds.
func TestCheckpointsAreCounted(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	ended, goOn := b.checkpointing(e, ctr, 0)
	b.awaitCalls("dump", 1)
	list := e.Summary().Checkpoints
	if len(list) != 1 || list[0].ID != ctr || list[0].PodID != pod || list[0].Name == "" || !list[0].Frozen || list[0].Since.IsZero() {
		t.Errorf("under way: %+v", list)
	}
	goOn()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	first := e.Summary()
	if len(first.Checkpoints) != 0 || first.Checkpointed.Times != 1 || first.Checkpointed.Sum <= 0 || first.Checkpointed.Bytes == 0 {
		t.Errorf("afterwards: %+v, %+v", first.Checkpoints, first.Checkpointed)
	}
	if err := os.Remove(b.archive()); err != nil {
		t.Error(err)
	}
	b.node.set(func() { b.node.fail["dump"] = errInjected })
	if err := e.CheckpointContainer(t.Context(), ctr, b.archive(), 0); !errors.Is(err, errInjected) {
		t.Error(err)
	}
	if second := e.Summary().Checkpointed; second.Times != 2 || second.Bytes != first.Checkpointed.Bytes {
		t.Errorf("after a failure: %+v", second)
	}
	b.remove(e, pod)
	b.nothingLeft()
}
