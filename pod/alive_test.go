package pod

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/mount"
	"github.com/crius-run/crius/pod/view"
)

// Readers find a dead pod not ready while a creation in it hangs, and do not wait for that: the
// creation is called off, and says why.
func TestReadersSeeADeadPodAtOnce(t *testing.T) {
	for name, read := range map[string]func(e *Engine, pod string) *view.Sandbox{
		"status": func(e *Engine, pod string) *view.Sandbox {
			v, err := e.Sandbox(pod)
			if err != nil {
				t.Error(err)
			}
			return v
		},
		"list": func(e *Engine, _ string) *view.Sandbox { return e.Sandboxes()[0] },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			e := b.engine()
			pod := b.run(e, "a")
			if v := read(e, pod); v.State != cri.PodSandboxState_SANDBOX_READY {
				t.Errorf("state before: %s", v.State)
			}
			b.node.block["create"] = make(chan struct{})
			created := make(chan error, 1)
			go func() {
				_, err := e.CreateContainer(context.Background(), pod, containerConfig("c"), nil)
				created <- err
			}()
			b.awaitCalls("create", 1)
			if err := unix.Unmount(filepath.Join(b.cfg.NamespacesDir, "utsns", "crius-"+pod), 0); err != nil {
				t.Fatal(err)
			}
			if v := read(e, pod); v.State != cri.PodSandboxState_SANDBOX_NOTREADY || len(v.IPs) > 0 {
				t.Errorf("state after: %s, %q", v.State, v.IPs)
			}
			if err := <-created; !errors.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "nothing is pinned") {
				t.Errorf("creation ended with %v", err)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}

// A pod lives on if what pins its namespaces is gone for a moment only. If several pods have lost
// theirs, the log says so once.
func TestPodsAreEndedAtASecondLook(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pods := []string{b.run(e, "a"), b.run(e, "b"), b.run(e, "c")}
		pin := func(pod string) string { return filepath.Join(b.cfg.NamespacesDir, "utsns", "crius-"+pod) }
		ready := func() (all []string) {
			for _, v := range e.Sandboxes() {
				if v.State == cri.PodSandboxState_SANDBOX_READY {
					all = append(all, v.ID)
				}
			}
			return all
		}
		b.want(ready(), pods...)
		for name, look := range map[string]func(){
			"status": func() { _, _ = e.Sandbox(pods[0]) },
			"list":   func() { e.Sandboxes() },
			"create": func() { b.create(e, pods[0], "c") },
		} {
			for _, pod := range pods {
				if err := unix.Unmount(pin(pod), 0); err != nil {
					t.Fatal(err)
				}
			}
			looked := make(chan struct{})
			go func() {
				defer close(looked)
				look()
			}()
			synctest.Wait() // for the first look
			for _, pod := range pods {
				if err := unix.Mount("/proc/self/ns/uts", pin(pod), "", unix.MS_BIND, ""); err != nil {
					t.Fatal(err)
				}
			}
			<-looked
			if got := ready(); len(got) != len(pods) {
				t.Errorf("%s: %d pods are ready", name, len(got))
			}
		}
		for _, pod := range pods[1:] {
			if err := unix.Unmount(pin(pod), 0); err != nil {
				t.Fatal(err)
			}
		}
		b.want(ready(), pods[0])
		for _, pod := range pods {
			b.remove(e, pod)
		}
		b.nothingLeft()
	})
}

// want compares ids in any order.
func (b *bench) want(got []string, ids ...string) {
	b.Helper()
	if slices.Sort(got); !slices.Equal(got, slices.Sorted(slices.Values(ids))) {
		b.Errorf("ready are %q, want %q", got, ids)
	}
}

// Files and mounts of a pod that somebody has removed are back when a container is created, and what
// is still there stays as it is.
func TestFilesOfAPodComeBack(t *testing.T) {
	for name, damage := range map[string]func(s *Sandbox) error{
		"shm":         func(s *Sandbox) error { return mount.Unmount(s.files.Shm()) },
		"files":       func(s *Sandbox) error { return mount.Unmount(s.files.Root()) },
		"resolv.conf": func(s *Sandbox) error { return os.Remove(s.files.ResolvConf()) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			e := b.engine()
			pod := b.run(e, "a")
			s, err := e.sandboxes.Find(pod)
			if err == nil {
				err = os.WriteFile(s.files.Hostname(), []byte("changed"), 0o644)
			}
			if err = errors.Join(err, damage(s)); err != nil || len(s.files.Missing()) == 0 {
				t.Fatal(err, s.files.Missing())
			}
			b.create(e, pod, "c")
			if missing := s.files.Missing(); len(missing) > 0 {
				t.Errorf("missing: %q", missing)
			}
			if text, err := os.ReadFile(s.files.Hostname()); err != nil || (string(text) == "changed") != (name == "shm") {
				t.Errorf("hostname %q, %v", text, err)
			}
			b.remove(e, pod)
			b.nothingLeft()
		})
	}
}
