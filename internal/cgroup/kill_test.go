package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// Kill does not wait for a process after its context has ended.
func TestAwaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if await(ctx, []int{os.Getpid()}, time.Hour) {
		t.Error("waited for a process that has not ended")
	}
}

// The processes of a cgroup die although somebody has frozen the one above it, as those of a pod do
// on v2. The one above stays frozen, with what else is in it.
func TestKillBelowAFrozenCgroup(t *testing.T) {
	t.Parallel()
	cgroup := scratch(t)
	start(t, cgroup+"/c", "sleep 1000 & exec sleep 1000")
	other := start(t, cgroup+"/other", "exec sleep 1000")
	var state, frozen, thawed string
	for _, h := range hierarchies(t) {
		if h.has("freezer") {
			state, frozen, thawed = h.dir(cgroup)+"/freezer.state", "FROZEN", "THAWED"
		} else if h.v2() && state == "" {
			state, frozen, thawed = h.dir(cgroup)+"/cgroup.freeze", "1", "0"
		}
	}
	if err := write(state, frozen); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = write(state, thawed) })
	if filepath.Base(state) == "freezer.state" {
		wait.For(t, "a frozen cgroup", func() bool { file, _ := Frozen(cgroup + "/c"); return file == state })
		wait.For(t, "all of it to be frozen", func() bool {
			text, _ := os.ReadFile(state)
			return strings.TrimSpace(string(text)) == frozen
		})
	}
	kill(t, cgroup+"/c")
	if text, err := os.ReadFile(state); err != nil || strings.TrimSpace(string(text)) != frozen {
		t.Errorf("the cgroup above is %q, %v", text, err)
	}
	if err := unix.Kill(other.Process.Pid, 0); err != nil {
		t.Errorf("the process beside: %v", err)
	}
	kill(t, cgroup+"/other")
	remove(t, cgroup)
}

// A container that is stopped is thawed, and nothing but the container: neither what is above it nor
// what it has frozen itself. Both versions, on files.
func TestThaw(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		names string
		files [2]string // which says that it was frozen itself, and by which it is thawed
		was   [2]string
		want  string
	}{
		"v1":          {"freezer", [2]string{"freezer.self_freezing", "freezer.state"}, [2]string{"1\n", "FROZEN\n"}, "THAWED"},
		"v1, thawed":  {"freezer", [2]string{"freezer.self_freezing", "freezer.state"}, [2]string{"0\n", "FROZEN\n"}, "FROZEN\n"}, // by one above
		"v2":          {"", [2]string{"cgroup.freeze", "cgroup.freeze"}, [2]string{"1\n", "1\n"}, "0"},
		"v2, thawed":  {"", [2]string{"cgroup.freeze", "cgroup.freeze"}, [2]string{"0\n", "0\n"}, "0\n"},
		"other of v1": {"memory", [2]string{"cgroup.freeze", "cgroup.freeze"}, [2]string{"", ""}, ""},
	} {
		h := hierarchy{membership: membership{names: c.names}, point: t.TempDir()}
		for _, dir := range []string{"/pod", "/pod/c", "/pod/c/below"} {
			if err := os.MkdirAll(h.point+dir, 0o755); err != nil {
				t.Fatal(err)
			}
			for i, was := range c.was {
				if err := os.WriteFile(h.point+dir+"/"+c.files[i], []byte(was), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		if thawed := h.thawOne("/pod/c"); thawed != (c.want == "THAWED" || c.want == "0") {
			t.Errorf("%s: thawed: %t", name, thawed)
		}
		for dir, want := range map[string]string{"/pod": c.was[1], "/pod/c": c.want, "/pod/c/below": c.was[1]} {
			if text, err := os.ReadFile(h.point + dir + "/" + c.files[1]); err != nil || strings.TrimSpace(string(text)) != strings.TrimSpace(want) {
				t.Errorf("%s: %s is %q, %v; want %q", name, dir, text, err, want)
			}
		}
	}
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
