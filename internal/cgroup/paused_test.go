package cgroup

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// A freezer is found in either version, in the cgroup itself or above it, and the advice thaws it.
func TestPaused(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	child := start(t, cgroup+"/c", "exec sleep 1000")
	wait.For(t, "a program with one thread", func() bool { // another may freeze half-way
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", child.Process.Pid))
		return string(name) == "sleep\n"
	})
	frozen := 0
	for _, h := range hierarchies(t) {
		for _, at := range []string{cgroup + "/c", cgroup} {
			state, value := h.dir(at)+"/freezer.state", "FROZEN"
			if h.v2() {
				state, value = h.dir(at)+"/cgroup.freeze", "1"
			} else if !h.has("freezer") {
				continue
			}
			if file, _ := Paused(cgroup + "/c"); file != "" {
				t.Errorf("%s is said to be frozen", file)
			}
			if err := write(state, value); err != nil {
				t.Fatal(err)
			}
			var file, thawed string
			wait.For(t, "a frozen cgroup", func() bool { file, thawed = Paused(cgroup + "/c"); return file != "" })
			if file != state {
				t.Errorf("%s is said to be frozen, want %s", file, state)
			}
			if err := write(file, thawed); err != nil {
				t.Fatal(err)
			}
			wait.For(t, "a thawed cgroup", func() bool { file, _ := Paused(cgroup + "/c"); return file == "" })
			frozen++
		}
	}
	if frozen == 0 {
		t.Error("no hierarchy can freeze")
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// crun has the processes of a container below their systemd scope, and freezes what is there.
func TestPausedBelowScope(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	scope := cgroup + "/crio-c.scope"
	child := start(t, scope+"/container", "exec sleep 1000")
	wait.For(t, "a program with one thread", func() bool {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", child.Process.Pid))
		return string(name) == "sleep\n"
	})
	h, f := pausable(hierarchies(t))
	if f == nil {
		t.Fatal("no hierarchy can freeze")
	}
	for _, at := range []string{scope + "/container", scope} {
		if err := write(h.dir(at)+"/"+f.file, f.freeze); err != nil {
			t.Fatal(err)
		}
		var file, thawed string
		wait.For(t, "a frozen cgroup", func() bool { file, thawed = Paused(scope); return file != "" })
		if file != h.dir(at)+"/"+f.file {
			t.Errorf("%s is said to be frozen", file)
		}
		if err := write(file, thawed); err != nil {
			t.Fatal(err)
		}
		wait.For(t, "a thawed cgroup", func() bool { file, _ := Paused(scope); return file == "" })
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// The nearest cgroup whose limit leaves no room is told, with its numbers.
func TestCrowded(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	start(t, cgroup+"/c", "exec sleep 1000")
	t.Cleanup(func() { remove(t, cgroup) })
	limit := func(at, most string) {
		t.Helper()
		if err := WriteFile(at, "pids.max", most); err != nil {
			t.Fatal(err)
		}
	}
	is := func(more uint64, want string) {
		t.Helper()
		at, tasks, most := Crowded(cgroup+"/c", more)
		if got := strings.TrimSpace(fmt.Sprintf("%s %d", strings.TrimPrefix(at, cgroup), most)); got != want || (at != "") != (tasks > 0) {
			t.Errorf("room for %d: %q with %d tasks, want %q", more, got, tasks, want)
		}
	}
	is(100, "0")
	if _, err := ReadFile(cgroup, "pids.max"); errors.Is(err, fault.NotFound) {
		kill(t, cgroup) // cgroup v2, where nobody has enabled the controller here
		return
	}
	limit(cgroup, "50")
	is(100, "50")
	is(1, "0")
	limit(cgroup+"/c", "60")
	is(100, "/c 60")
	kill(t, cgroup)
}
