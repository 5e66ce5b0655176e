package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/test/kit/wait"
)

const (
	interrupts = "/proc/irq/default_smp_affinity"
	latency    = "/sys/devices/system/cpu/cpu2/power/pm_qos_resume_latency_us"
)

// tunes gives the bench a machine with four CPUs that may be tuned. Of its cgroups there is
// the quota of one pod.
func (b *bench) tunes() {
	b.Helper()
	root := b.TempDir()
	for cpu := range 4 {
		b.writeCPU(root, fmt.Sprintf("/sys/devices/system/cpu/cpu%d/power/pm_qos_resume_latency_us", cpu), "0")
	}
	b.writeCPU(root, "/sys/devices/system/cpu/online", "0-3")
	b.writeCPU(root, interrupts, "f")
	b.writeCPU(root, "/quota", "200000")
	b.cfg.CPUs.Root = root
	b.cfg.CPUs.ReadCgroup = func(string, string) (string, error) { return "", fault.NotFound }
	b.cfg.CPUs.WriteCgroup = func(cgroup, name, value string) error {
		if cgroup != "/kubepods/pod1" || name != "cpu.cfs_quota_us" {
			return fault.NotFound
		}
		return os.WriteFile(filepath.Join(root, "quota"), []byte(value), 0o600)
	}
	b.node.allowed = []string{"irq-load-balancing.crio.io", "cpu-c-states.crio.io", "cpu-quota.crio.io"}
}

func (b *bench) writeCPU(root, path, text string) {
	b.Helper()
	path = filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
}

func (b *bench) cpuFile(path string) string {
	b.Helper()
	text, err := os.ReadFile(filepath.Join(b.cfg.CPUs.Root, path))
	if err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

func (b *bench) wantTuned(tuned bool) {
	b.Helper()
	wantMask, wantLatency := "f", "0"
	if tuned {
		wantMask, wantLatency = "9", "n/a"
	}
	if mask, us := b.cpuFile(interrupts), b.cpuFile(latency); mask != wantMask || us != wantLatency {
		b.Errorf("interrupts go to %s, latency is %s; want %s and %s", mask, us, wantMask, wantLatency)
	}
	_, err := os.Stat(b.cfg.StateDir + "/tuning/node/tuning.json")
	if (err == nil) != tuned {
		b.Errorf("on record: %v", err)
	}
}

// tunedPod and tunedContainer are requests of a kubelet for exclusive CPUs.
func tunedPod(name string) *cri.PodSandboxConfig {
	cfg := podConfig(name)
	cfg.Annotations = map[string]string{"irq-load-balancing.crio.io": "disable", "cpu-c-states.crio.io": "disable", "cpu-quota.crio.io": "disable"}
	cfg.Linux.CgroupParent = "/kubepods/pod1"
	return cfg
}

func tunedContainer(name string) *cri.ContainerConfig {
	cfg := containerConfig(name)
	cfg.Linux.Resources = &cri.LinuxContainerResources{CpuShares: 2048, CpuQuota: 200_000, CpuPeriod: 100_000, CpusetCpus: "1-2"}
	return cfg
}

func (b *bench) startTuned(e *Engine) (pod, ctr string) {
	b.Helper()
	pod, err := e.RunSandbox(b.Context(), "", tunedPod("a"))
	if err == nil {
		ctr, err = e.CreateContainer(b.Context(), pod, tunedContainer("c"), nil)
	}
	if err == nil {
		err = e.StartContainer(b.Context(), ctr)
	}
	if err != nil {
		b.Fatal(err)
	}
	b.wantTuned(true)
	return pod, ctr
}

// A container's CPUs are tuned when it starts, and restored before its end is reported. Updates
// by the kubelet leave it without a quota.
func TestTunedContainer(t *testing.T) {
	b := newBench(t)
	b.tunes()
	e := b.engine()
	pod, ctr := b.startTuned(e)
	if quota := b.cpuFile("/quota"); quota != "-1" {
		t.Errorf("quota of the pod is %s", quota)
	}
	task := b.task(ctr)
	if quota := task.spec.Linux.Resources.CPU.Quota; quota != nil {
		t.Errorf("quota of the container is %d", *quota)
	}
	if err := e.UpdateContainerResources(t.Context(), ctr, &cri.LinuxContainerResources{CpuQuota: 200_000, CpuPeriod: 100_000, CpusetCpus: "1-2"}); err != nil {
		t.Fatal(err)
	}
	if quota := task.updates[0].Resources.CPU.Quota; *quota != -1 {
		t.Errorf("an update sets the quota to %d", *quota)
	}
	b.node.set(func() { task.die(1) })
	b.waitState(e, ctr, cri.ContainerState_CONTAINER_EXITED)
	b.wantTuned(false)
	b.remove(e, pod)
	b.nothingLeft()
}

// An update of the CPUs takes the tuning along, before the start and while the container runs, with a
// server that dies in between. One that leaves no CPU for interrupts is refused.
func TestTuningFollowsUpdates(t *testing.T) {
	b := newBench(t)
	b.tunes()
	e := b.engine()
	pod, err := e.RunSandbox(t.Context(), "", tunedPod("a"))
	if err != nil {
		t.Fatal(err)
	}
	ctr, err := e.CreateContainer(t.Context(), pod, tunedContainer("c"), nil)
	if err != nil {
		t.Fatal(err)
	}
	update := func(cpus string, shares int64) error {
		return e.UpdateContainerResources(t.Context(), ctr, &cri.LinuxContainerResources{CpusetCpus: cpus, CpuShares: shares})
	}
	mask := func(when, want string) {
		t.Helper()
		if got := b.cpuFile(interrupts); got != want {
			t.Errorf("%s interrupts go to %s, want %s", when, got, want)
		}
	}
	if err := update("0-1", 0); err != nil {
		t.Fatal(err)
	}
	mask("before the start", "f")
	if err := e.StartContainer(t.Context(), ctr); err != nil {
		t.Fatal(err)
	}
	mask("after the start", "c")
	if err := update("1-2", 0); err != nil {
		t.Fatal(err)
	}
	b.wantTuned(true)
	b.close(e)
	e = b.engine()
	b.wantTuned(true)
	if err := update("3", 1024); err != nil {
		t.Fatal(err)
	}
	mask("with one CPU", "7")
	if us := b.cpuFile(latency); us != "0" {
		t.Errorf("latency of a CPU that was given back is %s", us)
	}
	if err := update("0-3", 4096); !errors.Is(err, fault.Invalid) || len(b.task(ctr).updates) != 3 {
		t.Errorf("all CPUs: %v, after %d updates of the runtime", err, len(b.task(ctr).updates))
	}
	mask("after a refusal", "7")
	task := b.task(ctr)
	b.node.set(func() { task.die(1) })
	b.waitState(e, ctr, cri.ContainerState_CONTAINER_EXITED)
	b.wantTuned(false)
	b.remove(e, pod)
	b.nothingLeft()
}

// Only containers with CPUs of their own are tuned, where the handler allows that.
func TestContainersThatAreNotTuned(t *testing.T) {
	for what, change := range map[string]func(b *bench, pod *cri.PodSandboxConfig, ctr *cri.ContainerConfig){
		"burstable": func(_ *bench, pod *cri.PodSandboxConfig, _ *cri.ContainerConfig) {
			pod.Linux.CgroupParent = "/kubepods/burstable/pod1"
		},
		"half a CPU": func(_ *bench, _ *cri.PodSandboxConfig, ctr *cri.ContainerConfig) {
			ctr.Linux.Resources.CpuShares = 1536
		},
		"not allowed":  func(b *bench, _ *cri.PodSandboxConfig, _ *cri.ContainerConfig) { b.node.allowed = []string{"*"} },
		"in a sandbox": func(b *bench, _ *cri.PodSandboxConfig, _ *cri.ContainerConfig) { b.node.sandbox = true },
		"by itself":    func(_ *bench, pod *cri.PodSandboxConfig, _ *cri.ContainerConfig) { pod.Annotations = nil },
	} {
		t.Run(what, func(t *testing.T) {
			b := newBench(t)
			b.tunes()
			pod, ctr := tunedPod("a"), tunedContainer("c")
			change(b, pod, ctr)
			e := b.engine()
			podID, err := e.RunSandbox(t.Context(), "", pod)
			if err != nil {
				t.Fatal(err)
			}
			id, err := e.CreateContainer(t.Context(), podID, ctr, nil)
			if err == nil {
				err = e.StartContainer(t.Context(), id)
			}
			if err != nil {
				t.Fatal(err)
			}
			b.wantTuned(false)
			if quota := b.task(id).spec.Linux.Resources.CPU.Quota; *quota != 200_000 {
				t.Errorf("the quota is %d", *quota)
			}
			b.remove(e, podID)
		})
	}
}

// What an earlier server left tuned is undone when a server starts, and nothing else.
func TestTuningAfterServerDied(t *testing.T) {
	for what, c := range map[string]struct {
		meanwhile func(b *bench, ctr string)
		tuned     bool
	}{
		"nothing has happened": {func(*bench, string) {}, true},
		"the container has ended": {func(b *bench, ctr string) {
			task := b.task(ctr)
			b.node.set(func() { task.die(1) })
		}, false},
		"the record of the container is lost": {func(b *bench, ctr string) {
			if err := os.RemoveAll(filepath.Join(b.cfg.StateDir, "containers", ctr)); err != nil {
				b.Fatal(err)
			}
		}, false},
		"the record of the container is of an older crius": {func(b *bench, ctr string) {
			path := filepath.Join(b.cfg.StateDir, "containers", ctr, "container.json")
			text, err := os.ReadFile(path)
			if err != nil {
				b.Fatal(err)
			}
			text = regexp.MustCompile(`"Tuning":\s*{[^}]*},`).ReplaceAll(text, nil)
			if err := os.WriteFile(path, text, 0o600); err != nil || strings.Contains(string(text), "Tuning") {
				b.Fatalf("%s, %v", text, err)
			}
		}, false},
		"the record of the pod is lost": {func(b *bench, _ string) {
			if err := os.RemoveAll(filepath.Join(b.cfg.StateDir, "pods")); err != nil {
				b.Fatal(err)
			}
		}, false},
		"the machine was booted": {func(b *bench, _ string) {
			b.boot = "another"
			b.writeCPU(b.cfg.CPUs.Root, interrupts, "f")
			b.writeCPU(b.cfg.CPUs.Root, latency, "0")
		}, false},
	} {
		t.Run(what, func(t *testing.T) {
			b := newBench(t)
			b.tunes()
			first := b.engine()
			pod, ctr := b.startTuned(first)
			b.close(first)
			b.wantTuned(true)
			c.meanwhile(b, ctr)
			e := b.engine()
			b.awaitCleanups(e)
			b.wantTuned(c.tuned)
			b.remove(e, pod)
			b.awaitCleanups(e)
			b.wantTuned(false)
		})
	}
}

// A record that cannot be read when the server starts is read later. Until then no CPUs are
// tuned.
func TestTuningWhenRecordCannotBeRead(t *testing.T) {
	b := newBench(t)
	b.tunes()
	first := b.engine()
	pod, ctr := b.startTuned(first)
	b.close(first)
	dir := filepath.Join(b.cfg.StateDir, "tuning")
	if err := errors.Join(os.Rename(dir, dir+".away"), os.Symlink(dir, dir)); err != nil {
		t.Fatal(err)
	}
	e := b.engine()
	if err := e.StopContainer(t.Context(), ctr, 0); err != nil {
		t.Fatal(err)
	}
	other, err := e.CreateContainer(t.Context(), pod, tunedContainer("other"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.StartContainer(t.Context(), other); !errors.Is(err, fault.Unavailable) {
		t.Errorf("a container was tuned: %v", err)
	}
	if mask := b.cpuFile(interrupts); mask != "9" {
		t.Errorf("interrupts go to %s", mask)
	}
	if err := errors.Join(os.Symlink(dir+".away", dir+".back"), os.Rename(dir+".back", dir)); err != nil {
		t.Fatal(err)
	}
	b.awaitCleanups(e)
	b.wantTuned(false)
	b.remove(e, pod)
}

func TestTuningOfFailedStart(t *testing.T) {
	b := newBench(t)
	b.tunes()
	e := b.engine()
	pod, err := e.RunSandbox(t.Context(), "", tunedPod("a"))
	if err != nil {
		t.Fatal(err)
	}
	b.node.fail["start"] = errInjected
	for name, spoil := range map[string]func(){"runtime": func() {}, "CPU": func() {
		if err := os.Remove(filepath.Join(b.cfg.CPUs.Root, latency)); err != nil {
			t.Fatal(err)
		}
	}} {
		ctr, err := e.CreateContainer(t.Context(), pod, tunedContainer(strings.ToLower(name)), nil)
		if err != nil {
			t.Fatal(err)
		}
		spoil()
		if err := e.StartContainer(t.Context(), ctr); err == nil {
			t.Errorf("%s: the start has not failed", name)
		}
		b.waitState(e, ctr, cri.ContainerState_CONTAINER_EXITED)
		b.writeCPU(b.cfg.CPUs.Root, latency, "0")
		b.wantTuned(false)
	}
	b.remove(e, pod)
}

// A container may die while it is being tuned.
func TestTuningOfDeadContainer(t *testing.T) {
	b := newBench(t)
	b.tunes()
	var e *Engine
	var ctr string
	b.hook = func(at trace.Point) error {
		if at.Step == "tune CPUs" && !at.After {
			task := b.task(ctr)
			b.node.set(func() { task.die(137) })
			b.waitState(e, ctr, cri.ContainerState_CONTAINER_EXITED)
		}
		return nil
	}
	e = b.engine()
	pod, err := e.RunSandbox(t.Context(), "", tunedPod("a"))
	if err == nil {
		ctr, err = e.CreateContainer(t.Context(), pod, tunedContainer("c"), nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.node.fail["start"] = errInjected
	if err := e.StartContainer(t.Context(), ctr); err == nil {
		t.Error("a dead container was started")
	}
	b.wantTuned(false)
	b.remove(e, pod)
}

// Containers start and end while systemd does not answer, and irqbalance is restarted when it
// does.
func TestTuningWhileSystemdHangs(t *testing.T) {
	b := newBench(t)
	b.tunes()
	b.cfg.Tuning.IrqbalanceFiles = []string{"/irqbalance"}
	answers, restarted := make(chan struct{}), make(chan struct{}, 10)
	b.cfg.CPUs.Run = func(ctx context.Context, _ []string, _ string, args ...string) error {
		select {
		case <-answers:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if args[0] == "restart" {
			restarted <- struct{}{}
		}
		return nil
	}
	e := b.engine()
	pod, ctr := b.startTuned(e)
	if err := e.StopContainer(t.Context(), ctr, 0); err != nil {
		t.Fatal(err)
	}
	if mask := b.cpuFile(interrupts); mask != "f" {
		t.Errorf("interrupts go to %s", mask)
	}
	if e.cleanups.Len() != 1 {
		t.Errorf("pending: %q", e.cleanups.Keys())
	}
	close(answers)
	<-restarted
	b.remove(e, pod)
	b.awaitCleanups(e)
	b.wantTuned(false)
}

// A setting that cannot be restored does not delay the report of the end, and is retried.
func TestTuningRestoredLater(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		b.tunes()
		e := b.engine()
		pod, ctr := b.startTuned(e)
		path := filepath.Join(b.cfg.CPUs.Root, interrupts)
		if err := os.Rename(path, path+".gone"); err != nil {
			t.Fatal(err)
		}
		if err := e.StopContainer(t.Context(), ctr, time.Minute); err != nil {
			t.Fatal(err)
		}
		if n := e.cleanups.Len(); n != 1 {
			t.Errorf("%d cleanups are pending", n)
		}
		if err := os.Rename(path+".gone", path); err != nil {
			t.Fatal(err)
		}
		wait.For(t, "the CPUs to be restored", func() bool { return b.cpuFile(interrupts) == "f" })
		b.awaitCleanups(e)
		b.wantTuned(false)
		b.remove(e, pod)
	})
}

// A setting that cannot be restored at all does not keep the container from being removed, and
// the next server tries again.
func TestRemovalOfContainerWhoseCPUsCannotBeRestored(t *testing.T) {
	b := newBench(t)
	b.tunes()
	e := b.engine()
	pod, ctr := b.startTuned(e)
	path := filepath.Join(b.cfg.CPUs.Root, interrupts)
	if err := os.Rename(path, path+".gone"); err != nil {
		t.Fatal(err)
	}
	if err := e.RemoveContainer(t.Context(), ctr); err != nil {
		t.Fatal(err)
	}
	b.remove(e, pod)
	if pending := e.cleanups.Keys(); !slices.Equal(pending, []string{"CPUs of " + ctr}) {
		t.Errorf("pending: %q", pending)
	}
	b.close(e)
	if err := os.Rename(path+".gone", path); err != nil {
		t.Fatal(err)
	}
	b.awaitCleanups(b.engine())
	b.wantTuned(false)
}
