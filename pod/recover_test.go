package pod

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/pod/view"
	"github.com/crius-run/crius/test/kit/wait"
)

// views returns everything that readers see, by id.
func views(e *Engine) map[string]any {
	all := map[string]any{}
	for _, v := range e.Sandboxes() {
		all["pod "+v.ID] = *v
	}
	for _, v := range e.Containers() {
		all["container "+v.ID] = *v
	}
	return all
}

// zoo makes pods and containers in every state.
func (b *bench) zoo(e *Engine) {
	b.Helper()
	pod := b.run(e, "zoo")
	b.create(e, pod, "created")
	b.start(e, pod, "running")
	stopped := b.start(e, pod, "stopped")
	if err := e.StopContainer(b.Context(), stopped, 0); err != nil {
		b.Fatal(err)
	}
	shared := podConfig("shared-pid")
	shared.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	host := podConfig("host")
	host.Linux.SecurityContext.NamespaceOptions = &cri.NamespaceOption{
		Network: cri.NamespaceMode_NODE, Ipc: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_NODE}
	for _, cfg := range []*cri.PodSandboxConfig{shared, host} {
		if _, err := e.RunSandbox(b.Context(), "fake", cfg); err != nil {
			b.Fatal(err)
		}
	}
	notReady := b.run(e, "not-ready")
	if err := e.StopSandbox(b.Context(), notReady); err != nil {
		b.Fatal(err)
	}
}

func (b *bench) removeAll(e *Engine) {
	b.Helper()
	for _, v := range e.Sandboxes() {
		b.remove(e, v.ID)
	}
	b.nothingLeft()
}

// A pod whose files an earlier version put into its run directory keeps them there, as its
// containers do, and is removed like any other.
func TestPodOfAnEarlierVersionKeepsItsFiles(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	b.close(e)
	dir := filepath.Join(b.cfg.RunDir, "pods", pod)
	files := []string{"resolv.conf", "hostname"}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range files {
		must(os.WriteFile(filepath.Join(dir, name), nil, 0o644))
	}
	must(mount.Unmount(filepath.Join(dir, "files")))
	must(os.Remove(filepath.Join(dir, "files")))
	e = b.fresh()
	rec, err := e.records.Pods.Get(pod)
	must(err)
	rec.OwnFiles = false
	must(e.records.Pods.Put(t.Context(), pod, rec))
	b.close(e)

	e = b.engine()
	if found := b.verify(e, false); len(found) > 0 {
		t.Errorf("found %q", found)
	}
	ctr := b.create(e, pod, "c")
	var sources []string
	for _, m := range b.node.tasks[ctr].spec.Mounts {
		sources = append(sources, m.Source)
	}
	for _, name := range files {
		if !slices.Contains(sources, filepath.Join(dir, name)) {
			t.Errorf("%s is not among the sources of mounts %q", name, sources)
		}
	}
	b.removeAll(e)
}

// TestRestartChangesNothing answers cri-o/cri-o#10014, #9987 and #4010.
func TestRestartChangesNothing(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	b.zoo(e)
	before := views(e)
	b.close(e)
	for range 2 { // a second restart finds what the first one left
		e = b.engine()
		if after := views(e); !sameViews(before, after) {
			t.Fatalf("before: %+v\nafter: %+v", before, after)
		}
		b.close(e)
	}
	e = b.engine()
	b.removeAll(e)
}

// sameViews compares with times as instants: a record keeps no monotonic clock.
func sameViews(a, b map[string]any) bool {
	if len(a) != len(b) {
		return false
	}
	for key := range a {
		if !reflect.DeepEqual(normal(a[key]), normal(b[key])) {
			return false
		}
	}
	return true
}

func normal(shown any) any {
	switch v := shown.(type) {
	case view.Sandbox:
		v.CreatedAt = v.CreatedAt.Round(0).UTC()
		v.Config = nil
		return v
	case view.Container:
		v.CreatedAt, v.StartedAt, v.FinishedAt = v.CreatedAt.Round(0).UTC(), v.StartedAt.Round(0).UTC(), v.FinishedAt.Round(0).UTC()
		v.Config, v.User, v.Resources, v.Mounts = nil, nil, nil, nil
		return v
	}
	return shown
}

// TestReboot: with another boot id everything is dead, nothing is forgotten, and what the
// kernel does not clean up by itself is released.
func TestReboot(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	b.zoo(e)
	pods, ctrs := len(e.Sandboxes()), len(e.Containers())
	b.close(e)
	// Things that a reboot removes:
	for _, v := range e.Sandboxes() {
		if err := ns.Remove(ns.Spec{Dir: b.cfg.NamespacesDir, Name: "crius-" + v.ID}); err != nil {
			t.Fatal(err)
		}
	}
	b.node.tasks = map[string]*fakeTask{}

	b.boot = "another"
	e = b.engine()
	if len(e.Sandboxes()) != pods || len(e.Containers()) != ctrs {
		t.Fatalf("%d pods and %d containers, want %d and %d", len(e.Sandboxes()), len(e.Containers()), pods, ctrs)
	}
	for _, v := range e.Sandboxes() {
		if v.State != cri.PodSandboxState_SANDBOX_NOTREADY {
			t.Errorf("pod %s is %s", v.Config.Metadata.Name, v.State)
		}
	}
	for _, v := range e.Containers() {
		if v.State != cri.ContainerState_CONTAINER_EXITED || v.FinishedAt.IsZero() {
			t.Errorf("container %s is %s since %s", v.Config.Metadata.Name, v.State, v.FinishedAt)
		}
	}
	b.node.set(func() {
		if len(b.node.networks) != 0 {
			t.Errorf("networks not given back: %v", b.node.networks)
		}
	})
	again := views(e)
	b.close(e)
	e = b.engine()
	if !sameViews(again, views(e)) {
		t.Error("a restart after the reboot changed something")
	}
	b.removeAll(e)
}

// An exit file that a power cut damaged makes the exit unknown; the container is not forgotten,
// and its pod can be removed.
func TestPowerCutDamagesAnExit(t *testing.T) {
	for what, bad := range map[string]string{"empty": "", "zeros": "\x00\x00\x00\x00", "cut": `{"version":1,"exit_co`} {
		b := newBench(t)
		e := b.engine()
		b.zoo(e)
		b.close(e)
		for _, v := range e.Sandboxes() {
			if err := ns.Remove(ns.Spec{Dir: b.cfg.NamespacesDir, Name: "crius-" + v.ID}); err != nil {
				t.Fatal(err)
			}
		}
		b.node.tasks = map[string]*fakeTask{}
		containers := e.Containers()
		for _, v := range containers {
			if err := os.WriteFile(filepath.Join(b.cfg.StateDir, "containers", v.ID, "exit.json"), []byte(bad), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		b.boot = "another"
		e = b.engine()
		if len(e.Containers()) != len(containers) || len(containers) == 0 {
			t.Errorf("%s: %d of %d containers are left", what, len(e.Containers()), len(containers))
		}
		for _, v := range e.Containers() {
			if v.State != cri.ContainerState_CONTAINER_EXITED || v.ExitCode == 0 || v.FinishedAt.IsZero() {
				t.Errorf("%s: container %s is %s with code %d", what, v.Config.Metadata.Name, v.State, v.ExitCode)
			}
		}
		b.removeAll(e)
		b.close(e)
	}
}

// TestDamagedRecord: an unreadable record does not keep the server from starting, and is not
// forgotten.
func TestDamagedRecord(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	damaged, whole := b.start(e, pod, "damaged"), b.start(e, pod, "whole")
	b.close(e)
	file := filepath.Join(b.cfg.StateDir, "containers", damaged, "container.json")
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	e = b.engine()
	if list := e.Containers(); len(list) != 1 || list[0].ID != whole {
		t.Errorf("containers: %+v", list)
	}
	if b.node.tasks[damaged] != nil {
		t.Error("the container behind the damaged record still runs")
	}
	if _, err := os.Stat(filepath.Join(b.cfg.StateDir, "containers", "damaged", damaged+".0")); err != nil {
		t.Errorf("the record was not kept: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(b.cfg.StateDir, "containers", "damaged")); err != nil {
		t.Fatal(err)
	}
	b.removeAll(e)
}

// TestLeftoversAreSwept: directories with an id of crius but no record are removed.
func TestLeftoversAreSwept(t *testing.T) {
	b := newBench(t)
	id := ids.Unmarked()
	for _, dir := range []string{b.cfg.RunDir + "/pods", b.cfg.RunDir + "/containers", b.cfg.StateDir + "/pods", b.cfg.StateDir + "/containers"} {
		if err := os.MkdirAll(filepath.Join(dir, id, "something"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	foreign := filepath.Join(b.cfg.RunDir, "pods", "not-ours")
	if err := os.MkdirAll(foreign, 0o700); err != nil {
		t.Fatal(err)
	}
	b.engine()
	if err := os.Remove(foreign); err != nil {
		t.Errorf("what is not ours was touched: %v", err)
	}
	b.nothingLeft()
}

// TestSweepDoesNotReachThroughMounts: what is mounted in a directory that is swept is not
// removed.
func TestSweepDoesNotReachThroughMounts(t *testing.T) {
	b := newBench(t)
	kept := filepath.Join(t.TempDir(), "kept")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"pods", "containers"} {
		point := filepath.Join(b.cfg.RunDir, kind, ids.Unmarked(), "below", "point")
		if err := os.MkdirAll(point, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(filepath.Dir(kept), point, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = mount.Unmount(point) })
	}
	b.engine()
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("deleted through a mount: %v", err)
	}
	b.nothingLeft()
}

// A pod that is torn down while the start looks for what has no record had one: it is no orphan.
func TestTornDownPodIsNoOrphan(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	b.close(e)
	rewrite(t, e.records.Pods, pod, func(r *records.Pod) { r.Phase = records.Creating })
	teardown, search := make(chan struct{}), make(chan struct{})
	before := b.node.count("leases")
	b.node.set(func() { b.node.block["detach"], b.node.block["leases"] = teardown, search })
	e = b.unrecovered()
	recovered := make(chan error, 1)
	go func() { recovered <- e.Recover(t.Context()) }()
	wait.For(t, "the search to be under way", func() bool { return b.node.count("leases") > before })
	close(teardown)
	b.awaitCleanups(e)
	close(search)
	if err := <-recovered; err != nil {
		t.Fatal(err)
	}
	if n := e.counters.leftovers.Load(); n != 0 || b.node.count("reclaim") != 0 {
		t.Errorf("%d orphans, network released %d times", n, b.node.count("reclaim"))
	}
	b.nothingLeft()
}

// TestUnfinishedIsTornDown walks through the phases in which a server can be
// killed in the middle of a create or remove.
func TestUnfinishedIsTornDown(t *testing.T) {
	for _, phase := range []records.Phase{records.Creating, records.Removing} {
		b := newBench(t)
		e := b.engine()
		pod := b.run(e, "a")
		ctr := b.start(e, pod, "c")
		b.close(e)
		// As if the server had been killed before the last put.
		rewrite(t, e.records.Containers, ctr, func(r *records.Container) { r.Phase = phase })
		e = b.engine()
		if n := len(e.Containers()); n != 0 {
			t.Errorf("%s: %d containers are seen", phase, n)
		}
		b.create(e, pod, "c")
		b.close(e)
		rewrite(t, e.records.Pods, pod, func(r *records.Pod) { r.Phase = phase })
		e = b.engine()
		if n := len(e.Sandboxes()) + len(e.Containers()); n != 0 {
			t.Errorf("%s: %d objects are seen", phase, n)
		}
		b.nothingLeft()
	}
}

// TestStartIsOnRecordBeforeItHappens, with its time: if the server is killed in the start of a
// short-lived container, only the record knows it.
func TestStartIsOnRecordBeforeItHappens(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.create(e, pod, "c")
	var early *records.Container
	e.deps.Trace.Hook = func(at trace.Point) (err error) {
		if at.Step == "runtime start" && !at.After {
			early, err = e.records.Containers.Get(ctr)
		}
		return err
	}
	before := time.Now()
	if err := e.StartContainer(t.Context(), ctr); err != nil {
		t.Fatal(err)
	}
	if early == nil || early.Phase != records.Starting || early.StartedAt.Before(before) || early.StartedAt.After(time.Now()) {
		t.Errorf("when the runtime starts it the record is %+v", early)
	}
	b.remove(e, pod)
	b.nothingLeft()
}

// TestUnfinishedStart: killed between the runtime's start and the record, the
// server asks the runtime.
func TestUnfinishedStart(t *testing.T) {
	for _, started := range []bool{false, true} {
		b := newBench(t)
		e := b.engine()
		pod := b.run(e, "a")
		ctr := b.create(e, pod, "c")
		b.node.tasks[ctr].started = started
		b.close(e)
		// The server may have been dead for long. The record knows when the container was
		// started, even if it has ended meanwhile.
		at := time.Now().Add(-time.Minute).UTC()
		rewrite(t, e.records.Containers, ctr, func(r *records.Container) { r.Phase, r.StartedAt = records.Starting, at })
		e = b.engine()
		want := cri.ContainerState_CONTAINER_CREATED
		if started {
			want = cri.ContainerState_CONTAINER_RUNNING
		}
		if v := v(e, ctr); v.State != want || started != v.StartedAt.Equal(at) || !started && !v.StartedAt.IsZero() {
			t.Errorf("started %t: state %s since %s", started, v.State, v.StartedAt)
		}
		b.remove(e, pod)
		b.nothingLeft()
	}
}

func rewrite[T any](t *testing.T, from *record.Dir[T], id string, change func(*T)) {
	t.Helper()
	doc, err := from.Get(id)
	if err != nil {
		t.Fatal(err)
	}
	change(doc)
	if err := from.Put(t.Context(), id, doc); err != nil {
		t.Fatal(err)
	}
}

// Cleanups that fail are retried.
func TestRecoverSurvivesFailingBackends(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		ctr := b.start(e, pod, "c")
		b.close(e)
		rewrite(t, e.records.Containers, ctr, func(r *records.Container) { r.Phase = records.Creating })
		b.node.fail["delete"] = errInjected
		e = b.engine()
		if e.cleanups.Len() == 0 {
			t.Error("no cleanup is pending")
		}
		if _, err := e.Sandbox(pod); err != nil {
			t.Errorf("the pod beside it: %v", err)
		}
		b.node.set(func() { delete(b.node.fail, "delete") })
		b.awaitCleanups(e)
		b.removeAll(e)
	})
}

// When a pod is torn down at the start, one step releases its network. Whatever its result,
// what remains of the pod is removed with its network.
func TestUnfinishedPodWhoseDetachFailsLate(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		b.close(e)
		rewrite(t, e.records.Pods, pod, func(r *records.Pod) { r.Phase = records.Creating })
		failed := false
		b.hook = func(at trace.Point) error {
			if at.Step == "detach network" && at.After && !failed {
				failed = true
				return errInjected
			}
			return nil
		}
		e = b.engine()
		b.awaitCleanups(e)
		if !failed {
			t.Error("the step did not come by")
		}
		b.nothingLeft()
	})
}
