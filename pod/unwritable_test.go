package pod

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/ns"
)

// full makes writing the exit of a container fail, as on a full disk, until room is called.
func (b *bench) full(id string) (exitFile string, room func()) {
	b.Helper()
	exitFile = filepath.Join(b.cfg.StateDir, "containers", id, "exit.json")
	obstacle := exitFile + ".tmp"
	if err := os.Mkdir(obstacle, 0o700); err != nil {
		b.Fatal(err)
	}
	return exitFile, func() {
		b.Helper()
		if err := os.Remove(obstacle); err != nil {
			b.Fatal(err)
		}
	}
}

func (b *bench) wantRecorded(exitFile string, code int32) {
	b.Helper()
	if exit, err := conmon.ReadExit(exitFile); err != nil || exit.Code != code {
		b.Errorf("on record: %+v, %v; want code %d", exit, err, code)
	}
}

// Containers that died with the machine are not forgotten if the disk is full.
func TestRebootWithAFullDisk(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		ctr := b.start(e, pod, "c")
		b.close(e)
		if err := ns.Remove(ns.Spec{Dir: b.cfg.NamespacesDir, Name: "crius-" + pod}); err != nil {
			t.Fatal(err)
		}
		b.node.set(func() { b.node.tasks = map[string]*fakeTask{} })
		exitFile, room := b.full(ctr)

		b.boot = "another"
		e = b.engine()
		v, err := e.Container(ctr)
		if err != nil || v.State != cri.ContainerState_CONTAINER_EXITED || v.ExitCode != codeUnknown {
			t.Fatalf("%+v, %v", v, err)
		}
		room()
		b.awaitCleanups(e)
		b.wantRecorded(exitFile, codeUnknown)
		b.remove(e, pod)
		b.nothingLeft()
	})
}

// The end of a container without a monitor needs no room, and is recorded once there is some.
func TestUnstartableEndsOnAFullDisk(t *testing.T) {
	timeless(t, func(t *testing.T, b *bench) {
		e := b.engine()
		pod := b.run(e, "a")
		b.refuses(errProgram)
		stopped, removed := b.create(e, pod, "stopped"), b.create(e, pod, "removed")
		exitFile, room := b.full(stopped)
		b.full(removed)
		for _, id := range []string{stopped, removed} {
			if err := e.StopContainer(t.Context(), id, time.Hour); err != nil {
				t.Error(err)
			}
			b.wantStartError(e, id)
		}
		if err := e.RemoveContainer(t.Context(), removed); err != nil {
			t.Error(err)
		}
		room()
		b.awaitCleanups(e)
		b.wantRecorded(exitFile, 128)
		b.remove(e, pod)
		b.nothingLeft()
	})
}

// A monitor that has ended is not lost if it recorded the exit, even if the server could not
// read that at first.
func TestMonitorLostWithItsExitRecorded(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	e := b.engine()
	pod := b.run(e, "a")
	ctr := b.start(e, pod, "c")
	exitFile := filepath.Join(b.cfg.StateDir, "containers", ctr, "exit.json")
	if err := conmon.WriteExit(exitFile, conmon.Exit{Code: 7, FinishedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	c, err := e.containers.Find(ctr)
	if err != nil {
		t.Fatal(err)
	}
	if exit := c.lost(conmon.ErrLost); exit.Code != 7 || b.node.count("kill") != 0 {
		t.Errorf("it is said to have exited with %d %q, and was killed %d times", exit.Code, exit.Message, b.node.count("kill"))
	}
	b.wantRecorded(exitFile, 7)
	b.remove(e, pod)
	b.nothingLeft()
}
