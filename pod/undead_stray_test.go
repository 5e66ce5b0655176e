package pod

import (
	"errors"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/hangfs"
	"github.com/crius-run/crius/test/kit/wait"
)

// What lives in a stray's cgroup and cannot be killed keeps the rest of the stray
// from being removed for a time that is bounded, and is said.
func TestStrayThatCannotBeKilled(t *testing.T) {
	t.Parallel() // it waits for strayTime
	b := newBench(t)
	e := b.engine()
	f, err := hangfs.Mount(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	own, err := cgroup.Own()
	if err != nil {
		t.Fatal(err)
	}
	id := newID()
	name := filepath.Join(own, "crius-test", id)
	undead := exec.Command("stat", filepath.Join(f.Dir, "file"))
	err = cgroup.Start(name, func(attr *syscall.SysProcAttr) error {
		undead.SysProcAttr = attr
		return undead.Start()
	})
	t.Cleanup(func() {
		if err := f.Release(); err != nil {
			t.Error(err)
		}
		_ = undead.Wait() // killed
		if err := errors.Join(cgroup.Remove(name), cgroup.Remove(filepath.Dir(name))); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the process to hang", func() bool { return f.Waiting() > 0 })
	b.node.set(func() { b.node.calls = nil })
	err = e.sweepStray(t.Context(), &stray{id: id, traces: map[string]bool{"cgroup": true}, cgroups: []string{name}})
	if !errors.Is(err, fault.Timeout) {
		t.Errorf("the repair says %v", err)
	}
	if b.node.count("delete") == 0 || b.node.count("remove rootfs") == 0 {
		t.Error("the rest of the stray was not removed")
	}
}
