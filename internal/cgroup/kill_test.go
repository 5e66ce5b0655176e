package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/test/kit/wait"
)

// populate waits until cgroup has that many processes.
func populate(t testing.TB, cgroup string, want int) {
	t.Helper()
	wait.For(t, fmt.Sprint(want, " processes in the cgroup"), func() bool { return procs(t, cgroup) >= want })
}

// procs counts the processes in cgroup.
func procs(t testing.TB, cgroup string) int {
	t.Helper()
	pids, err := Procs(cgroup)
	if err != nil {
		t.Fatal(err)
	}
	return len(pids)
}

func TestKillTree(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	var children []*exec.Cmd
	for _, at := range []string{"/", "/a", "/a/b", "/a/b/c", "/d"} {
		children = append(children, start(t, cgroup+at, "trap '' TERM INT HUP; sleep 1000 & sleep 1000 & wait"))
	}
	kill(t, cgroup)
	for _, c := range children {
		c.Wait()
		if status := c.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
			t.Errorf("%s ended with %v", c.Args[1], status)
		}
	}
	kill(t, cgroup) // empty
	for range 2 {
		remove(t, cgroup)
	}
	kill(t, cgroup) // gone
}

// A program may end its main thread and continue in others. The kernel then
// shows the process as a zombie in the root of v1 hierarchies, and nevertheless
// lists it in its cgroup.
func TestKillProcessWithoutMainThread(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), loseEnv+"="+cgroup+"/c")
	run(t, cgroup, cmd)
	wait.For(t, "the main thread to end", func() bool { return withoutLeader("/proc/" + strconv.Itoa(cmd.Process.Pid)) })
	isMember, err := Membership(cgroup)
	if err != nil || !isMember(cmd.Process.Pid) {
		t.Errorf("it is not in its cgroup (%v)", err)
	}
	if isMember, err := Membership(cgroup + "/other"); err != nil || isMember(cmd.Process.Pid) {
		t.Errorf("it is in another cgroup (%v)", err)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// Processes that fork as fast as they can must not escape Kill.
func TestKillForkers(t *testing.T) {
	t.Parallel()
	for range 3 {
		cgroup := scratch(t)
		// Each generation starts its successor and ends: no pid lives long.
		const hop = `f() { (f &) ; exit; }; f`
		for range 2 {
			start(t, cgroup, hop)
		}
		start(t, cgroup+"/deep/er", `while :; do (sleep 1000 &) ; (exit) ; done & while :; do (true &) ; done`)
		populate(t, cgroup, 10) // let them multiply
		kill(t, cgroup)
		time.Sleep(5 * time.Millisecond)
		if pids, err := Procs(cgroup); err != nil || len(pids) != 0 {
			t.Errorf("risen again: %v, %v", pids, err)
		}
		remove(t, cgroup)
	}
}

// A single process that forks a successor and ends is not frozen at first, and
// must not escape either.
func TestKillLoneForker(t *testing.T) {
	t.Parallel()
	for range 20 {
		cgroup := scratch(t)
		start(t, cgroup, `f() { (f &) ; exit; }; f`)
		kill(t, cgroup)
		remove(t, cgroup)
	}
}

// A paused container (frozen below the cgroup that is killed) dies too.
func TestKillFrozen(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	start(t, cgroup+"/c", "exec sleep 1000")
	frozen := false
	for _, h := range hierarchies(t) {
		for file, value := range map[string]string{"/freezer.state": "FROZEN", "/cgroup.freeze": "1"} {
			frozen = write(h.dir(cgroup+"/c")+file, value) == nil || frozen
		}
	}
	if !frozen {
		t.Fatal("could not freeze")
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

// Kernels before 5.14 cannot kill a v2 cgroup as a whole: it is frozen while
// its processes are killed, because they could fork faster than that.
func TestFreezeWhereTheCgroupCannotBeKilledAsAWhole(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		names, file         string
		files               []string
		was, frozen, thawed string
	}{
		"v2":                       {file: "cgroup.freeze", was: "0", frozen: "1", thawed: "0"},
		"v2 that kills as a whole": {file: "cgroup.freeze", files: []string{"cgroup.kill"}, was: "0", frozen: "0", thawed: "0"},
		"v1 freezer":               {names: "freezer", file: "freezer.state", was: "THAWED", frozen: "FROZEN", thawed: "THAWED"},
	} {
		h := hierarchy{membership{names: c.names}, t.TempDir(), "/"}
		file := h.point + "/c/" + c.file
		content := func(when, want string) {
			if got, err := os.ReadFile(file); err != nil || string(got) != want {
				t.Errorf("%s: %s: %q, %v, want %q", name, when, got, err, want)
			}
		}
		err := errors.Join(os.Mkdir(h.point+"/c", 0o755), os.WriteFile(file, []byte(c.was), 0o644))
		for _, other := range c.files {
			err = errors.Join(err, os.WriteFile(h.point+"/c/"+other, nil, 0o644))
		}
		if err != nil {
			t.Fatal(err)
		}
		if told := freeze(t.Context(), []hierarchy{h}, "/c"); told != (c.frozen != c.was) {
			t.Errorf("%s: told: %v", name, told)
		}
		content("after freeze", c.frozen)
		thaw([]hierarchy{h}, "/c")
		content("after thaw", c.thawed)
	}
}

// Kill gives up on unkillable processes when the context ends.
func TestKillGivesUp(t *testing.T) {
	t.Parallel()
	if Detect() == V2 {
		return // where frozen processes can be killed there are no unkillable ones
	}
	cgroup := scratch(t)
	child := start(t, cgroup+"/c", "exec sleep 1000")
	var freezer hierarchy
	for _, h := range hierarchies(t) {
		if h.has("freezer") {
			freezer = h
		}
	}
	state := freezer.dir(cgroup) + "/freezer.state" // above what is killed
	if err := write(state, "FROZEN"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	err := Kill(ctx, cgroup+"/c")
	if !errors.Is(err, fault.Timeout) || !strings.Contains(fmt.Sprint(err), strconv.Itoa(child.Process.Pid)) {
		t.Errorf("%v, want fault.Timeout and the pid %d", err, child.Process.Pid)
	}
	if err := write(state, "THAWED"); err != nil {
		t.Fatal(err)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

func TestKillRefusesOwn(t *testing.T) {
	t.Parallel()
	for _, cgroup := range []string{"/", "//", "/./"} {
		if err := Kill(t.Context(), cgroup); !errors.Is(err, fault.Invalid) {
			t.Errorf("Kill(%q) = %v", cgroup, err)
		}
		if err := Remove(t.Context(), cgroup); !errors.Is(err, fault.Invalid) {
			t.Errorf("Remove(%q) = %v", cgroup, err)
		}
	}
	for _, h := range hierarchies(t) {
		if err := Kill(t.Context(), h.own); !errors.Is(err, fault.Invalid) {
			t.Errorf("Kill(%q) = %v", h.own, err)
		}
	}
}

// A pid that was reused by a process outside must not be killed.
func TestSignalChecksMembership(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	stranger := start(t, cgroup+"/other", "exec sleep 1000")
	signal(hierarchies(t), cgroup+"/mine", stranger.Process.Pid)
	signal(hierarchies(t), cgroup+"/oth", stranger.Process.Pid)
	time.Sleep(10 * time.Millisecond)
	if pids, err := Procs(cgroup + "/other"); err != nil || len(pids) != 1 {
		t.Errorf("the stranger was killed: %v, %v", pids, err)
	}
	kill(t, cgroup)
	remove(t, cgroup)
}

func TestList(t *testing.T) {
	t.Parallel()
	if got := list([]int{1, 2, 3}); got != "1 2 3" {
		t.Error(got)
	}
	if got := list(slices.Repeat([]int{7}, 10)); !bytes.HasSuffix([]byte(got), []byte("7 7 and 2 more")) {
		t.Error(got)
	}
}
