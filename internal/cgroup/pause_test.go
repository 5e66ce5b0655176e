package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
)

// frozen reports whether all of a cgroup is frozen.
func frozen(t *testing.T, cgroup string) bool {
	t.Helper()
	all, _, err := find()
	if err != nil {
		t.Fatal(err)
	}
	h, f := pausable(all)
	text, err := os.ReadFile(h.dir(cgroup) + "/" + f.state)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(text), f.frozen)
}

func TestPause(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	start(t, cgroup, "sleep 1000 & wait")
	populate(t, cgroup, 2)
	if err := Pause(t.Context(), cgroup); err != nil {
		t.Fatal(err)
	}
	if !frozen(t, cgroup) {
		t.Error("it is not frozen")
	}
	if err := Pause(t.Context(), cgroup); !errors.Is(err, fault.Precondition) {
		t.Errorf("frozen by somebody else: %v", err)
	}
	if !Thaw(cgroup) || frozen(t, cgroup) {
		t.Error("it stays frozen")
	}
	for bad, want := range map[string]error{"/": fault.Invalid, cgroup + "/missing": os.ErrNotExist} {
		if err := Pause(t.Context(), bad); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", bad, err, want)
		}
	}
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Pause(late, cgroup); err == nil { // it may have frozen at once
		Thaw(cgroup)
	}
	if frozen(t, cgroup) {
		t.Error("it stays frozen although the time was up")
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// A process that executes a program waits until its other threads have died. On v1 those cannot if they are frozen
// first, and the cgroup would never be.
func TestPauseDuringExec(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cgroup := scratch(t)
	again := fmt.Sprintf("%s='' %s='%s' '%[3]s' & ", joinEnv, execEnv, program)
	start(t, cgroup, again+again+"wait")
	populate(t, cgroup, 3)
	for range 200 {
		if err := Pause(t.Context(), cgroup); err != nil {
			t.Fatal(err)
		}
		if !frozen(t, cgroup) {
			t.Fatal("it is not frozen")
		}
		Thaw(cgroup)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// What has been killed, or ends, dies before the rest is frozen, and not in the hands of whoever thaws it. If the first
// thread of a process ends it, only the others are killed.
func TestPauseAfterKill(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Run("killed", func(t *testing.T) {
		t.Parallel()
		pausesAlive(t, "while :; do sleep 1000 & kill -9 $!; wait; done & ", 50)
	})
	t.Run("ends", func(t *testing.T) {
		t.Parallel()
		pausesAlive(t, fmt.Sprintf("while :; do %s='' %s=yes '%s'; done & ", joinEnv, exitEnv, program), 200)
	})
}

func pausesAlive(t *testing.T, again string, times int) {
	t.Helper()
	cgroup := scratch(t)
	start(t, cgroup, again+again+"wait")
	populate(t, cgroup, 3)
	all, _, err := find()
	if err != nil {
		t.Fatal(err)
	}
	h, _ := pausable(all)
	for range times {
		if err := Pause(t.Context(), cgroup); err != nil {
			t.Fatal(err)
		}
		pids, err := members([]hierarchy{h}, cgroup)
		if err != nil || len(pids) == 0 {
			t.Fatal(pids, err)
		}
		for _, pid := range pids {
			threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
			for _, thread := range threads {
				if zombie, killed := threadIn(thread); killed && !zombie {
					t.Fatalf("%s of process %d is frozen and has been killed", thread, pid)
				}
			}
		}
		Thaw(cgroup)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// crun has the processes one below a systemd scope; a frozen scope would be a frozen parent.
func TestPauseOfAScope(t *testing.T) {
	t.Parallel()
	h := hierarchy{membership: membership{names: "freezer"}, point: t.TempDir()}
	for cgroup, want := range map[string]string{"/a.scope": "/a.scope/container", "/b.scope": "/b.scope", "/c": "/c"} {
		below := cgroup
		if want != cgroup || cgroup == "/c" {
			below += "/container"
		}
		if err := os.MkdirAll(h.dir(below), 0o755); err != nil {
			t.Fatal(err)
		}
		if got := ofContainer(h, cgroup); got != want {
			t.Errorf("%s: %s, want %s", cgroup, got, want)
		}
	}
}
