package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ids"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/network"
	"github.com/crius-run/crius/pod/audit"
	"github.com/crius-run/crius/pod/records"
	"github.com/crius-run/crius/storage"
	"github.com/crius-run/crius/test/kit/turn"
	"github.com/crius-run/crius/test/kit/wait"
)

// verify returns what Verify reports, a line for each finding.
func (b *bench) verify(e *Engine, repair bool) []string {
	b.Helper()
	found, err := e.audit.Verify(b.Context(), repair)
	if err != nil {
		b.Error(err)
	}
	return describe(found)
}

func describe(found []audit.Finding) []string {
	var lines []string
	for _, f := range found {
		lines = append(lines, fmt.Sprintf("%s: %s -> %s%s [repaired %t] %s", f.Object, f.Wrong, f.Remedy, f.Advice, f.Repaired, f.Err))
	}
	return lines
}

// paths returns everything on the bench's disk.
func (b *bench) paths() []string {
	b.Helper()
	var all []string
	for _, root := range []string{b.cfg.StateDir, b.cfg.RunDir, b.cfg.NamespacesDir} {
		err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
			all = append(all, path)
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	return all
}

// inspect returns what another program reports while no server runs.
func (b *bench) inspect() []string {
	b.Helper()
	paths := func() []string { // but for what goes as soon as the record after it is on the disk
		return slices.DeleteFunc(b.paths(), func(path string) bool { return strings.HasSuffix(path, ".last") })
	}
	before, ports := paths(), b.node.count("restore")
	e := b.fresh()
	found, err := e.Inspect(b.Context())
	if err != nil {
		b.Error(err)
	}
	if after := paths(); !slices.Equal(before, after) || b.node.count("restore") != ports {
		b.Errorf("looking has changed\n%q to\n%q", before, after)
	}
	b.close(e)
	return describe(found)
}

// fresh returns an engine that has not recovered.
func (b *bench) fresh() *Engine {
	b.Helper()
	e, err := New(b.Context(), b.cfg, Deps{Images: fakeImages{b.node}, Network: fakeNetwork{b.node}, Runtimes: fakeRuntimes{b.node}})
	if err != nil {
		b.Fatal(err)
	}
	if b.boot != "" {
		e.planner().Boot, e.audit.Boot = b.boot, b.boot
	}
	return e
}

func says(lines []string, words ...string) bool {
	return slices.ContainsFunc(lines, func(line string) bool {
		return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) })
	})
}

// A healthy node has no findings, whatever states its pods and containers are in.
func TestVerifyOfAHealthyNode(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	b.zoo(e)
	if _, err := b.runWithPort(e, "port"); err != nil {
		t.Fatal(err)
	}
	if found := b.verify(e, true); len(found) > 0 {
		t.Errorf("a running server: %q", found)
	}
	b.close(e)
	if found := b.inspect(); len(found) > 0 {
		t.Errorf("no server: %q", found)
	}
	e = b.engine()
	if found := b.verify(e, true); len(found) > 0 {
		t.Errorf("after a restart: %q", found)
	}
	b.removeAll(e)
}

// A panic in a check ends that check, but neither the server nor the verbs of the checked pod.
func TestPanicInACheck(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	for _, name := range []string{"sound", "damaged"} {
		b.node.damage[b.run(e, name)] = []network.Damage{{}}
	}
	sound := e.audit.Network
	e.audit.Network = panicking{sound}
	if found, err := e.audit.Verify(t.Context(), false); !errors.Is(err, fault.Internal) {
		t.Errorf("%v, %v", found, err)
	}
	e.audit.Network = sound
	clear(b.node.damage)
	b.removeAll(e)
	if found := b.verify(e, true); len(found) > 0 {
		t.Errorf("%q", found)
	}
}

// panicking panics when it is asked about one pod, whose Life is held then.
type panicking struct{ audit.Network }

func (n panicking) Verify(pods []network.Attached) map[string][]network.Damage {
	if len(pods) == 1 {
		panic("a defect")
	}
	return n.Network.Verify(pods)
}

// A check that hangs keeps neither its caller nor the next check longer than the caller waits.
func TestCheckThatHangsIsLeftBehind(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	hung, before := make(chan struct{}), b.node.count("leases") // at the start
	defer close(hung)
	b.node.set(func() { b.node.block["leases"] = hung })
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error)
	go func() {
		_, err := e.audit.Verify(ctx, true)
		ended <- err
	}()
	wait.For(t, "the check to hang", func() bool { return b.node.count("leases") > before })

	impatient, leave := context.WithCancel(t.Context())
	leave()
	if _, err := e.audit.Verify(impatient, false); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "another check is running") {
		t.Errorf("a second check meanwhile: %v", err)
	}
	gone := errors.New("gone")
	cancel(gone)
	if err := <-ended; !errors.Is(err, gone) {
		t.Errorf("the first check: %v", err)
	}
	b.node.set(func() { delete(b.node.block, "leases") })
	if found := b.verify(e, true); len(found) > 0 {
		t.Errorf("the next check: %q", found)
	}
}

// damage is done to a pod with one container; the repair is seen in the end.
type damage struct {
	name   string
	do     func(b *bench, pod, ctr string)
	want   string // in the finding
	manual bool   // nothing but a person repairs it
	dead   bool   // the repair stops the pod
}

func damages() []damage {
	pin := func(b *bench, kind, pod string) string {
		return filepath.Join(b.cfg.NamespacesDir, kind, "crius-"+pod)
	}
	file := func(b *bench, parts ...string) string {
		return filepath.Join(append([]string{b.cfg.StateDir}, parts...)...)
	}
	return []damage{
		{name: "network namespace", do: func(b *bench, pod, _ string) { unix.Unmount(pin(b, "netns", pod), 0) }, want: "nothing is pinned", dead: true},
		{name: "IPC namespace", do: func(b *bench, pod, _ string) {
			unix.Unmount(pin(b, "ipcns", pod), 0)
			os.Remove(pin(b, "ipcns", pod))
		}, want: "ipcns", dead: true},
		{name: "shm", do: func(b *bench, pod, _ string) {
			mount.Unmount(filepath.Join(b.cfg.RunDir, "pods", pod, "shm"))
		}, want: "nothing is mounted at", manual: true},
		{name: "files", do: func(b *bench, pod, _ string) {
			mount.Unmount(filepath.Join(b.cfg.RunDir, "pods", pod, "files"))
		}, want: "nothing is mounted at", manual: true},
		{name: "resolv.conf", do: func(b *bench, pod, _ string) {
			os.Remove(filepath.Join(b.cfg.RunDir, "pods", pod, "files", "resolv.conf"))
		}, want: "resolv.conf is gone", manual: true},
		{name: "interface", do: func(b *bench, pod, _ string) {
			b.node.set(func() { b.node.damage[pod] = []network.Damage{{Text: "no eth0", Dead: true}} })
		}, want: "no eth0", dead: true},
		{name: "address", do: func(b *bench, pod, _ string) {
			b.node.set(func() { b.node.damage[pod] = []network.Damage{{Text: "no address"}} })
		}, want: "no address", manual: true},
		{name: "infra container", do: func(b *bench, pod, _ string) {
			b.node.set(func() { b.node.tasks[pod].die(137) })
		}, want: "infra container is dead", dead: true},
		{name: "writable layer", do: func(b *bench, _, ctr string) {
			b.node.set(func() { b.node.defects = []storage.Defect{{Rootfs: ctr, Text: "no upper"}} })
		}, want: "no upper", manual: true},
		{name: "record of the pod", do: func(b *bench, pod, _ string) { os.Remove(file(b, "pods", pod, "pod.json")) }, want: "record on disk is not usable"},
		{name: "record of the container", do: func(b *bench, _, ctr string) {
			os.Remove(file(b, "containers", ctr, "container.json.last")) // of a record that changes while it is synced
			os.WriteFile(file(b, "containers", ctr, "container.json"), []byte("{"), 0o600)
		}, want: "record on disk is not usable"},
		{name: "host ports", do: func(b *bench, pod, _ string) { b.node.set(func() { clear(b.node.exposed) }) }, want: "ports lead to"},
		{name: "image store", do: func(b *bench, _, _ string) {
			b.node.set(func() {
				b.node.defects = []storage.Defect{{Object: "layer 7", Text: "no image", Remedy: "deleted", Mend: func(context.Context) error {
					b.node.set(func() { b.node.defects = nil })
					return nil
				}}}
			})
		}, want: "layer 7: no image"},
	}
}

// Each damage is found while the server runs, and repaired on request; the pod beside it is not
// affected.
func TestVerifyFindsDamage(t *testing.T) {
	for _, d := range damages() {
		t.Run(d.name, func(t *testing.T) {
			b := newBench(t)
			e := b.engine()
			cfg := podConfig("damaged")
			cfg.PortMappings = []*cri.PortMapping{{HostPort: 8080, ContainerPort: 80}}
			cfg.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
			if d.name == "infra container" {
				// Its end is noticed at once while the server runs.
				b.close(e)
				b.infraDiesUnseen(cfg)
				return
			}
			pod, err := e.RunSandbox(t.Context(), "", cfg)
			if err != nil {
				t.Fatal(err)
			}
			bystander := b.start(e, b.run(e, "bystander"), "c")
			ctr := b.start(e, pod, "c")
			d.do(b, pod, ctr)
			if found := b.verify(e, false); !says(found, d.want, "repaired false") || len(found) != 1 {
				t.Fatalf("looked: %q", found)
			}
			found := b.verify(e, true)
			if !says(found, d.want, fmt.Sprintf("repaired %t", !d.manual)) {
				t.Errorf("repaired: %q", found)
			}
			b.node.set(func() {
				if d.dead {
					delete(b.node.damage, pod)
				}
			})
			if found := b.verify(e, false); len(found) > 0 != d.manual {
				t.Errorf("afterwards: %q", found)
			}
			state := cri.PodSandboxState_SANDBOX_READY
			if d.dead {
				state = cri.PodSandboxState_SANDBOX_NOTREADY
			}
			if v, err := e.Sandbox(pod); err != nil || v.State != state {
				t.Errorf("the pod is %v, %v, want %s", v, err, state)
			}
			if s := v(e, bystander).State; s != cri.ContainerState_CONTAINER_RUNNING {
				t.Errorf("the container beside it is %s", s)
			}
			b.node.set(func() { b.node.defects = nil })
			b.removeAll(e)
		})
	}
}

// infraDiesUnseen kills the infra container while no server runs to notice it.
func (b *bench) infraDiesUnseen(cfg *cri.PodSandboxConfig) {
	e := b.engine()
	pod, err := e.RunSandbox(b.Context(), "", cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.close(e)
	b.node.set(func() { b.node.tasks[pod].die(137) })
	if found := b.inspect(); !says(found, pod, "its infra container is dead", "stop it") {
		b.Errorf("%q", found)
	}
	e = b.engine()
	if found := b.verify(e, false); len(found) > 0 {
		b.Errorf("after a restart: %q", found)
	}
	b.removeAll(e)
}

// The end of a container is recorded again, and an end that no server saw is reported.
func TestVerifyExits(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	stopped, lost := b.start(e, pod, "stopped"), b.start(e, pod, "lost")
	if err := e.StopContainer(t.Context(), stopped, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(b.cfg.StateDir, "containers", stopped, "exit.json")); err != nil {
		t.Fatal(err)
	}
	want := v(e, stopped).ExitCode
	if found := b.verify(e, true); !says(found, stopped, "its exit is not recorded", "repaired true") || len(found) != 1 {
		t.Errorf("%q", found)
	}
	b.close(e)
	close(b.task(lost).lost)
	if found := b.inspect(); !says(found, lost, "its monitor died without recording") || len(found) != 1 {
		t.Errorf("%q", found)
	}
	e = b.engine()
	if found := b.verify(e, false); len(found) > 0 {
		t.Errorf("%q", found)
	}
	if v(e, stopped).ExitCode != want || v(e, lost).State != cri.ContainerState_CONTAINER_EXITED {
		t.Errorf("%+v, %+v", v(e, stopped), v(e, lost))
	}
	b.removeAll(e)
}

// Without a server, a check reports what the start of one would repair and repairs nothing;
// then the server repairs it, and nothing remains to be reported.
func TestInspectThenRepair(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(b *bench, e *Engine, pod, ctr string)
		want string
	}{
		"creation cut short": {func(b *bench, e *Engine, _, ctr string) {
			rewrite(b.T, e.records.Containers, ctr, func(r *records.Container) { r.Phase = records.Creating })
		}, "its creation was interrupted"},
		"removal cut short": {func(b *bench, e *Engine, pod, _ string) {
			rewrite(b.T, e.records.Pods, pod, func(r *records.Pod) { r.Phase = records.Removing })
		}, "its removal was interrupted"},
		"stop cut short": {func(b *bench, e *Engine, pod, _ string) {
			rewrite(b.T, e.records.Pods, pod, func(r *records.Pod) { r.Phase = records.Stopping })
		}, "stopping it did not finish"},
		"damaged record": {func(b *bench, _ *Engine, _, ctr string) {
			os.WriteFile(filepath.Join(b.cfg.StateDir, "containers", ctr, "container.json"), []byte("{"), 0o600)
		}, "cannot be read"},
		"missing pod": {func(b *bench, e *Engine, pod, _ string) {
			os.Remove(filepath.Join(b.cfg.StateDir, "pods", pod, "pod.json"))
		}, "has no record"},
		"reboot": {func(b *bench, _ *Engine, pod, _ string) {
			b.boot = "another"
			ns.Remove(ns.Spec{Dir: b.cfg.NamespacesDir, Name: "crius-" + pod})
		}, "the node was rebooted"},
		"network not settled": {func(b *bench, e *Engine, pod, _ string) {
			rewrite(b.T, e.records.Pods, pod, func(r *records.Pod) { r.Phase = records.Stopped })
		}, "its network was not released"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			e := b.engine()
			pod := b.run(e, "a")
			ctr := b.start(e, pod, "c")
			b.close(e)
			c.do(b, e, pod, ctr)
			if found := b.inspect(); !says(found, c.want) {
				t.Fatalf("%q, want %q", found, c.want)
			}
			looked, err := b.fresh().Inspect(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			e = b.engine()
			repaired, err := e.audit.Verify(t.Context(), true)
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range describe(audit.Mended(looked, repaired)) {
				if !strings.Contains(line, "repaired true") {
					t.Errorf("not repaired: %s", line)
				}
			}
			if found := b.verify(e, false); len(found) > 0 {
				t.Errorf("afterwards: %q", found)
			}
			os.RemoveAll(filepath.Join(b.cfg.StateDir, "containers", "damaged"))
			if name == "missing pod" { // how its network was made only the record knew
				b.node.set(func() { clear(b.node.networks) })
			}
			b.removeAll(e)
		})
	}
}

// What cannot be finished is not reported as repaired.
func TestUnfinishedCleanupIsNotReportedAsRepaired(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	b.close(e)
	rewrite(t, e.records.Containers, ctr, func(r *records.Container) { r.Phase = records.Creating })
	b.node.fail["delete"] = errInjected
	looked, err := b.fresh().Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e = b.engine()
	repaired, err := e.audit.Verify(t.Context(), true)
	if err != nil {
		t.Fatal(err)
	}
	if found := describe(audit.Mended(looked, repaired)); !says(found, "interrupted", "repaired false") || !says(found, "cleanup of "+ctr, errInjected.Error()) {
		t.Errorf("%q", found)
	}
	b.node.set(func() { delete(b.node.fail, "delete") })
	if found := b.verify(e, true); len(found) > 0 && !says(found, "cleanup", "repaired true") {
		t.Errorf("%q", found)
	}
	b.removeAll(e)
}

// strew makes one thing of each kind with an unknown id.
func (b *bench) strew() (id string, traces []string) {
	b.Helper()
	id = ids.Unmarked()
	for _, dir := range []string{b.cfg.RunDir + "/pods", b.cfg.RunDir + "/containers", b.cfg.StateDir + "/pods", b.cfg.StateDir + "/containers"} {
		if err := os.MkdirAll(filepath.Join(dir, id), 0o700); err != nil {
			b.Fatal(err)
		}
		traces = append(traces, "directory "+filepath.Join(dir, id))
	}
	shm := filepath.Join(b.cfg.RunDir, "pods", id, "shm")
	if err := mount.Shm(shm, 1<<20, ""); err != nil {
		b.Fatal(err)
	}
	pins, err := ns.Create(ns.Spec{Dir: b.cfg.NamespacesDir, Name: "crius-" + id, Net: true, UTS: true})
	if err != nil {
		b.Fatal(err)
	}
	b.node.set(func() {
		b.node.leased = append(b.node.leased, network.Lease{File: "/leases/10.0.0.9", Address: "10.0.0.9", Owner: id, Since: time.Now().Add(-time.Hour)})
	})
	return id, append(traces, "mount "+shm, "namespace "+pins.Net, "namespace "+pins.UTS, "address 10.0.0.9, reserved in /leases/10.0.0.9,")
}

// Orphans are found, whether or not a server runs, and removed on request.
func TestVerifyFindsOrphans(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	b.zoo(e)
	id, traces := b.strew()
	want := func(found []string, repaired bool) {
		t.Helper()
		for _, trace := range traces {
			if !says(found, "orphan "+id+": "+trace, fmt.Sprintf("repaired %t", repaired)) {
				t.Errorf("nothing about %s", trace)
			}
		}
		if len(found) != len(traces) {
			t.Errorf("%d findings, want %d: %q", len(found), len(traces), found)
		}
	}
	want(b.verify(e, false), false)
	b.close(e)
	want(b.inspect(), false)
	for _, dir := range []string{"containers", "pods"} { // which the start sweeps, and all with it that it knows of
		os.RemoveAll(filepath.Join(b.cfg.StateDir, dir, id))
		mount.Unmount(filepath.Join(b.cfg.RunDir, dir, id, "shm"))
		os.RemoveAll(filepath.Join(b.cfg.RunDir, dir, id))
	}
	traces = traces[5:]
	e = b.engine()
	want(b.verify(e, true), true)
	if found := b.verify(e, false); len(found) > 0 {
		t.Errorf("afterwards: %q", found)
	}
	b.removeAll(e)
}

// In places that servers may share, things with the mark of another server's root belong to
// that server; things with our own mark are orphans.
func TestObjectsOfAnotherServerAreLeftAlone(t *testing.T) {
	turn.SeeAddresses(t)
	b := newBench(t)
	e := b.engine()
	for root, strays := range map[string]int{"/another/root": 0, b.cfg.StateDir: 3} {
		id := ids.New(ids.Mark(root))
		pins := ns.Spec{Dir: b.cfg.NamespacesDir, Name: "crius-" + id, Net: true, UTS: true}
		if _, err := ns.Create(pins); err != nil {
			t.Fatal(err)
		}
		lease := network.Lease{File: "/leases/10.0.0.9", Address: "10.0.0.9", Owner: id, Since: time.Now().Add(-time.Hour)}
		b.node.set(func() { b.node.leased = []network.Lease{lease} })
		if found := b.verify(e, true); len(found) != strays {
			t.Errorf("of root %s: %q, want %d findings", root, found, strays)
		}
		if strays > 0 {
			continue
		}
		if _, err := ns.Inode(pins.Paths().UTS); err != nil || len(b.node.leased) != 1 {
			t.Errorf("of root %s: namespace %v, leases %v", root, err, b.node.leased)
		}
		if err := ns.Remove(pins); err != nil {
			t.Fatal(err)
		}
	}
	b.removeAll(e)
}

// Addresses that are new, in use on this node, or of another runtime are left alone.
func TestForeignLeasesAreLeftAlone(t *testing.T) {
	turn.SeeAddresses(t)
	b := newBench(t)
	e := b.engine()
	old := time.Now().Add(-time.Hour)
	foreign := []network.Lease{
		{Address: "10.0.0.1", Owner: ids.Unmarked(), Since: time.Now()},
		{Address: "127.0.0.1", Owner: ids.Unmarked(), Since: old},
		{Address: "10.0.0.2", Owner: "cni-1234", Since: old},
		{Address: "10.0.0.3", Owner: b.run(e, "ours"), Since: old},
	}
	b.node.set(func() { b.node.leased = slices.Clone(foreign) })
	if found := b.verify(e, true); len(found) > 0 || len(b.node.leased) != len(foreign) {
		t.Errorf("%q; left are %+v", found, b.node.leased)
	}
	b.removeAll(e)
}

// While a pod of another runtime hides its addresses, a reservation may be for that pod: it is
// reported, and stays.
func TestLeaseThatMayBeOfAPodThatHidesIt(t *testing.T) {
	turn.HideAddresses(t)
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		b.run(e, "ours")
		foreign := ns.Spec{Dir: b.cfg.NamespacesDir, Name: "foreign", Net: true}
		set, err := ns.Create(foreign)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range []string{"link add br0 type bridge", "link set br0 up"} {
			if out, err := exec.Command("nsenter", slices.Concat([]string{"--net=" + set.Net, "ip"}, strings.Fields(line))...).CombinedOutput(); err != nil {
				t.Fatalf("ip %s: %v: %s", line, err, out)
			}
		}
		lease := network.Lease{File: "/leases/10.0.0.9", Address: "10.0.0.9", Owner: ids.Unmarked(), Since: time.Now().Add(-time.Hour)}
		b.node.set(func() { b.node.leased = []network.Lease{lease} })
		if found := b.verify(e, true); len(found) != 1 || !says(found, lease.File, "a pod of another runtime may be using it", "repaired false") {
			t.Errorf("%q", found)
		}
		b.close(e)
		if found := b.inspect(); len(found) != 1 || !says(found, lease.File, "a pod of another runtime may be using it") {
			t.Errorf("without a server: %q", found)
		}
		e = b.engine()
		if err := ns.Remove(foreign); err != nil {
			t.Fatal(err)
		}
		if found := b.verify(e, true); !says(found, lease.File, "repaired true") && !says(found, "a pod of another runtime may be using it") {
			t.Errorf("without that pod: %q", found)
		}
		b.node.set(func() { b.node.leased = nil })
		b.removeAll(e)
	})
}

// Things that a runtime keeps for other programs are not ours, wherever its root is.
func TestForeignRuntimeStateIsLeftAlone(t *testing.T) {
	for root, ours := range map[string]bool{"elsewhere": false, "r/runtime/runc": true} {
		b := newBench(t)
		b.node.root = filepath.Join(filepath.Dir(b.cfg.RunDir), root)
		e := b.engine()
		if err := os.MkdirAll(filepath.Join(b.node.root, ids.Unmarked()), 0o700); err != nil {
			t.Fatal(err)
		}
		if found := b.verify(e, false); len(found) > 0 != ours {
			t.Errorf("%s: %q", root, found)
		}
	}
}

// A repair that fails is tried again, and keeps what it needs for that.
func TestOrphanRemovalThatFailsIsRetried(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	id, _ := b.strew()
	b.node.set(func() { b.node.fail["reclaim"] = errInjected })
	if found := b.verify(e, true); !says(found, "address", errInjected.Error()) {
		t.Errorf("%q", found)
	}
	if _, err := ns.Inode(filepath.Join(b.cfg.NamespacesDir, "netns", "crius-"+id)); err != nil {
		t.Errorf("plugins give back less without the namespace: %v", err)
	}
	b.node.set(func() { delete(b.node.fail, "reclaim") })
	if found := b.verify(e, true); !says(found, "address", "repaired true") {
		t.Errorf("%q", found)
	}
	b.nothingLeft()
}

// Pods come and go, and nothing is ever wrong with them.
func TestVerifyUnderChurn(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	var churn sync.WaitGroup
	for i := range 4 {
		churn.Go(func() {
			for n := range 20 {
				pod := b.run(e, fmt.Sprintf("churn-%d-%d", i, n))
				ctr := b.start(e, pod, "c")
				if n%2 == 0 {
					b.node.set(func() { b.node.tasks[ctr].die(1) })
				}
				b.remove(e, pod)
			}
		})
	}
	done := make(chan struct{})
	go func() { churn.Wait(); close(done) }()
	for over := false; !over && !t.Failed(); {
		select {
		case <-done: // and look once more
			over = true
		default:
		}
		if found := b.verify(e, true); len(found) > 0 {
			t.Errorf("%q", found)
		}
	}
	<-done
	b.nothingLeft()
}

// Everything is removed, even unknown things; what cannot be removed stays on record and is
// reported.
func TestWipe(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	b.zoo(e)
	b.strew()
	b.node.set(func() { b.node.fail["detach"] = errInjected })
	left, err := e.Wipe(t.Context())
	if err != nil || !says(describe(left), "cleanup of", "network not released: "+errInjected.Error()) || len(b.node.tasks)+len(b.node.rootfs) > 0 {
		t.Errorf("%q, %v", describe(left), err)
	}
	if docs, _, _, err := e.records.Pods.Read(); err != nil || len(docs) != len(left) {
		t.Errorf("%d records for %d pending cleanups, %v", len(docs), len(left), err)
	}
	b.node.set(func() { delete(b.node.fail, "detach") })
	if left, err := e.Wipe(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("%q, %v", describe(left), err)
	}
	b.nothingLeft()
	b.remove(e, b.run(e, "after"))
	b.nothingLeft()
}

// What cannot be checked is not dead: neither a monitor that does not answer nor a caller that
// leaves ends a pod.
func TestRepairSparesWhatItCannotSee(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	cfg := podConfig("shared")
	cfg.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD
	pod, err := e.RunSandbox(t.Context(), "", cfg)
	if err != nil {
		t.Fatal(err)
	}
	alive := func(after string) {
		t.Helper()
		if v, err := e.Sandbox(pod); err != nil || v.State != cri.PodSandboxState_SANDBOX_READY {
			t.Errorf("after %s: %+v, %v", after, v, err)
		}
	}
	b.node.set(func() { b.node.fail["load"] = errInjected })
	if found := b.verify(e, true); !says(found, "cannot be checked", errInjected.Error(), "repaired false") {
		t.Errorf("found %q", found)
	}
	alive("a monitor that does not answer")
	gone, leave := context.WithCancel(t.Context())
	leave()
	if _, err := e.audit.Verify(gone, true); !errors.Is(err, context.Canceled) {
		t.Errorf("a check without its caller: %v", err)
	}
	alive("a caller who has left")
	b.node.set(func() { delete(b.node.fail, "load") })
	b.remove(e, pod)
	b.nothingLeft()
}
