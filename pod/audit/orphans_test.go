package audit

import (
	"context"
	"crypto/rand"
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/ns"
	"github.com/crius-run/crius/test/kit/hangfs"
	"github.com/crius-run/crius/test/kit/wait"
)

// sweeps is a Node that counts.
type sweeps struct {
	Node
	n int
}

func (s *sweeps) Sweep(context.Context, string, func(context.Context) error) error { s.n++; return nil }

// What lives in an orphan's cgroup and cannot be killed keeps the rest of the orphan
// from being removed for a while only.
func TestOrphanThatCannotBeKilled(t *testing.T) {
	f, err := hangfs.Mount(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	own, err := cgroup.Own()
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(own, "crius-test-"+rand.Text())
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
		if err := cgroup.Remove(context.Background(), name); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the process to hang", func() bool { return f.Waiting() > 0 })
	node := &sweeps{}
	auditor := New(Sources{Node: node})
	err = auditor.remove(t.Context(), &orphan{id: "a", traces: map[string]bool{"cgroup": true}, cgroups: []string{name}})
	if !errors.Is(err, fault.Timeout) {
		t.Errorf("the removal says %v", err)
	}
	if node.n != 1 {
		t.Errorf("the rest of the orphan was removed %d times", node.n)
	}
}

// An address that something on the node has is seen in namespaces that only a
// mount keeps.
func TestPinnedNetworks(t *testing.T) {
	spec := ns.Spec{Dir: t.TempDir(), Name: "another", Net: true, UTS: true}
	set, err := ns.Create(spec)
	if err != nil {
		t.Fatal(err)
	}
	pins, err := pinnedNetworks()
	if err != nil || !slices.Contains(pins, set.Net) || slices.Contains(pins, set.UTS) {
		t.Errorf("%q, %v, want %s among them", pins, err, set.Net)
	}
	if err := ns.Remove(spec); err != nil {
		t.Fatal(err)
	}
}
