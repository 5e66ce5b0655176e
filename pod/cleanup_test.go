package pod

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/internal/trace"
	"github.com/crius-run/crius/pod/rundir"
)

// A removal that cannot be finished is retried: the object is gone for readers, its name is
// free, and the rest follows once it is possible.
func TestContainerRemovalThatFailsIsRetried(t *testing.T) {
	for _, step := range []string{"remove rootfs", "delete"} {
		timeless(t, func(t *testing.T, b *bench) {
			e := b.engine()
			pod := b.run(e, "a")
			ctr := b.start(e, pod, "c")
			b.node.set(func() { b.node.fail[step] = errInjected })
			for range 2 {
				if err := e.RemoveContainer(t.Context(), ctr); err != nil {
					t.Errorf("%s: %v", step, err)
				}
			}
			if _, err := e.Container(ctr); !errors.Is(err, fault.NotFound) || e.cleanups.Len() != 1 {
				t.Errorf("%s: the removed container: %v; %d pending cleanups", step, err, e.cleanups.Len())
			}
			if p := e.Summary().Pending; len(p) != 1 || p[0].ID != ctr || p[0].Name != "default/a/c" {
				t.Errorf("%s: pending: %+v", step, p)
			}
			again := b.create(e, pod, "c") // the same name
			b.node.set(func() { delete(b.node.fail, step) })
			b.awaitCleanups(e)
			if _, err := e.Container(again); err != nil {
				t.Errorf("%s: the cleanup took the new container: %v", step, err)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}

// The retried cleanup of a failed creation removes its empty log, but not that of a later
// attempt to create the same container.
func TestCleanupKeepsTheLogOfALaterAttempt(t *testing.T) {
	for _, again := range []bool{false, true} {
		timeless(t, func(t *testing.T, b *bench) {
			e := b.engine()
			podCfg, cfg := podConfig("a"), containerConfig("c")
			podCfg.LogDirectory, cfg.LogPath = t.TempDir(), "c.log"
			pod, err := e.RunSandbox(t.Context(), "", podCfg)
			if err != nil {
				t.Fatal(err)
			}
			log := filepath.Join(podCfg.LogDirectory, cfg.LogPath)
			b.node.set(func() { b.node.fail["create"], b.node.fail["delete"] = errInjected, errInjected })
			if _, err := e.CreateContainer(t.Context(), pod, cfg, nil); !errors.Is(err, errInjected) || e.cleanups.Len() != 1 {
				t.Fatalf("%v; %d pending cleanups", err, e.cleanups.Len())
			}
			b.node.set(func() { delete(b.node.fail, "create") })
			if again {
				if _, err := e.CreateContainer(t.Context(), pod, cfg, nil); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(log, nil, 0o600); err != nil { // as monitors do
				t.Fatal(err)
			}
			b.node.set(func() { delete(b.node.fail, "delete") })
			b.awaitCleanups(e)
			if _, err := os.Lstat(log); errors.Is(err, fs.ErrNotExist) == again {
				t.Errorf("created again: %v; the log: %v", again, err)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}

// What a container leaves behind counts in its pod until it is gone.
func TestLeftoversOfContainersTakeRoomInTheirPod(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, b *bench, e *Engine, pod string){
		"of a removal": func(t *testing.T, b *bench, e *Engine, pod string) {
			if err := e.RemoveContainer(t.Context(), b.start(e, pod, "c")); err != nil {
				t.Error(err)
			}
		},
		"of a creation": func(t *testing.T, b *bench, e *Engine, pod string) {
			b.node.set(func() { b.node.fail["create"] = errInjected })
			if _, err := e.CreateContainer(t.Context(), pod, containerConfig("c"), nil); !errors.Is(err, errInjected) {
				t.Error(err)
			}
		},
	} {
		timeless(t, func(t *testing.T, b *bench) {
			e := b.engine()
			pod := b.run(e, "a")
			s, err := e.sandboxes.Find(pod)
			if err != nil {
				t.Fatal(err)
			}
			empty := func() bool {
				defer s.room.Free("probe")
				return s.room.Claim("probe", rundir.Use{Requests: rundir.MaxPod}, func() rundir.Use { return rundir.Use{} }) == nil
			}
			b.node.set(func() { b.node.fail["delete"] = errInjected })
			leave(t, b, e, pod)
			if e.cleanups.Len() != 1 || empty() {
				t.Errorf("%s: %d pending cleanups, which take no room: %v", name, e.cleanups.Len(), empty())
			}
			b.node.set(func() { clear(b.node.fail) })
			b.awaitCleanups(e)
			if !empty() {
				t.Errorf("%s: the room is not given back", name)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}

func TestPodRemovalThatFailsIsRetried(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	cfg := podConfig("a")
	cfg.Linux.SecurityContext.NamespaceOptions.Pid = cri.NamespaceMode_POD // an infra container
	pod, err := e.RunSandbox(t.Context(), "", cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.StopSandbox(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	b.node.set(func() { b.node.fail["delete"] = errInjected })
	if err := e.RemoveSandbox(t.Context(), pod); err != nil {
		t.Error(err)
	}
	if _, err := e.Sandbox(pod); !errors.Is(err, fault.NotFound) || e.cleanups.Len() != 1 {
		t.Errorf("the removed pod: %v; %d pending cleanups", err, e.cleanups.Len())
	}
	b.node.set(func() { delete(b.node.fail, "delete") })
	b.close(e)
	b.engine() // finds the work by the records
	b.nothingLeft()
}

// The server starts even if images or handlers are gone, and the images of containers that it
// cannot manage now stay held.
func TestStartWithoutImageOrHandler(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	b.close(e)
	b.node.set(func() { b.node.fail["adopt"] = fault.NotFound })
	e = b.engine()
	if _, err := e.Container(ctr); err != nil {
		t.Errorf("without its image: %v", err)
	}
	b.close(e)
	b.node.set(func() { delete(b.node.fail, "adopt"); b.node.unknown = true })
	b.close(b.engine())
	if !b.node.rootfs[ctr] {
		t.Error("the image of a container of an unknown handler was let go of")
	}
	b.node.set(func() { b.node.unknown = false })
	e = b.engine()
	if v, err := e.Container(ctr); err != nil || v.State != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("with its handler back: %+v, %v", v, err)
	}
	b.remove(e, pod)
}

// A pod whose network is being released never comes back to life: its address may belong to
// another pod by then.
func TestStopThatIsCutShort(t *testing.T) {
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	hang := make(chan struct{})
	b.node.set(func() { b.node.block["detach"] = hang })
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _ = e.StopSandbox(ctx, pod) }()
	b.awaitCalls("detach", 1)
	cancel()
	// The server is killed; the next one finds what is on disk.
	b.node.set(func() { delete(b.node.block, "detach") })
	second, err := New(b.Context(), b.cfg, Deps{Images: fakeImages{b.node}, Network: fakeNetwork{b.node}, Runtimes: fakeRuntimes{b.node}})
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.close(second) })
	if v, err := second.Sandbox(pod); err != nil || v.State != cri.PodSandboxState_SANDBOX_NOTREADY || len(v.IPs) != 0 {
		t.Errorf("after the kill: %+v, %v", v, err)
	}
	close(hang)
}

// Removing the namespaces of a stopped pod is retried, even if its network is already released.
func TestNamespacesAreRemovedUntilTheyAreGone(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		var failures atomic.Int32
		b.hook = func(at trace.Point) error {
			if at.Step == "remove namespaces" && !at.After && failures.Add(1) == 1 {
				return errInjected
			}
			return nil
		}
		e := b.engine()
		pod := b.run(e, "a")
		b.node.set(func() { b.node.fail["detach"] = errInjected })
		if err := e.StopSandbox(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		b.node.set(func() { delete(b.node.fail, "detach") })
		b.awaitCleanups(e)
		s, err := e.sandboxes.Find(pod)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range s.plan.Pins() {
			if _, err := ns.Inode(path); !errors.Is(err, fault.NotFound) {
				t.Errorf("%s: %v", path, err)
			}
		}
		if n := failures.Load(); n < 2 {
			t.Errorf("namespaces were removed %d times", n)
		}
		b.remove(e, pod)
		b.nothingLeft()
	})
}

// A container without a known cgroup can be stopped although its exit has a message.
func TestStopWithoutKnownCgroup(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	id := b.start(e, pod, "c")
	c, err := e.containers.Find(id)
	if err != nil {
		t.Fatal(err)
	}
	c.ref.Cgroup = "" // its record is of an early release
	task := b.task(id)
	b.node.set(func() {
		task.exit = conmon.Exit{Code: 3, Message: "monitor did not report the exit"}
		close(task.dead)
	})
	b.waitState(e, id, cri.ContainerState_CONTAINER_EXITED)
	if err := e.StopContainer(t.Context(), id, 0); err != nil {
		t.Error(err)
	}
	b.remove(e, pod)
	b.nothingLeft()
}
