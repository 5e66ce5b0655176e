package pod

import (
	"errors"
	"sync/atomic"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/test/kit/wait"
)

// The plan of a pod's network is synced to the disk while the rest of the pod is made, and no
// plugin is called before that has finished.
func TestPlanIsOnTheDiskBeforePluginsRun(t *testing.T) {
	b := newBench(t)
	var made atomic.Bool
	written := make(chan struct{})
	b.hook = func(at trace.Point) error {
		switch {
		case at.Step == "make namespaces" && at.After:
			made.Store(true)
		case at.Step == "sync record" && !at.After:
			<-written
		}
		return nil
	}
	e := b.engine()
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.run(e, "a")
	}()
	wait.For(t, "the namespaces to be made", made.Load)
	docs, _, _, err := e.records.Pods.Read()
	for _, rec := range docs {
		if rec.Network == nil {
			t.Errorf("the record has no plan: %+v", rec)
		}
	}
	if err != nil || len(docs) != 1 {
		t.Errorf("%d records, %v", len(docs), err)
	}
	if n := b.node.count("attach"); n > 0 {
		t.Errorf("%d attachments before the plan was on the disk", n)
	}
	close(written)
	<-done
	b.removeAll(e)
}

// A kubelet has the driver of its cgroups from here alone.
func TestCgroupDriverForKubelets(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for driver, want := range map[string]cri.CgroupDriver{"systemd": cri.CgroupDriver_SYSTEMD, "cgroupfs": cri.CgroupDriver_CGROUPFS} {
		b.cfg.CgroupDriver = driver
		if got := b.engine().CgroupDriver(); got != want {
			t.Errorf("%s: %s", driver, got)
		}
	}
}

// A driver that cannot make cgroups keeps pods from running, not only their containers.
func TestPodIsRefusedWhereTheCgroupDriverCannotWork(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	e.cgroups = func() error { return fault.Unavailable }
	if _, err := e.RunSandbox(t.Context(), "", podConfig("a")); !errors.Is(err, fault.Unavailable) {
		t.Errorf("without cgroups: %v", err)
	}
	e.cgroups = func() error { return nil }
	b.run(e, "a")
	b.removeAll(e)
}
